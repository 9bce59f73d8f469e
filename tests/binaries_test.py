#!/usr/bin/env python3
"""What the built libraries and the command export, and how they are hardened.

  tests/binaries_test.py exports BUILD_DIR [--update]    the symbols of libweft.so, libweft_c.so and the archives
  tests/binaries_test.py hardening BUILD_DIR CXX CUDA    full RELRO, no executable stack, PIE, canaries, control-flow protection

The functions that libweft.so exports are listed in tests/exports.txt. --update writes the list. Whatever the list says, a name that no header in
include/weft declares is refused.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "exports.txt"
faults = []


def fault(text):
    faults.append(text)
    print(text)


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def headers():
    return {path.name: path.read_text() for path in sorted((ROOT / "include" / "weft").glob("*.h"))}


def c_functions(*names):
    """The functions that C headers declare."""
    text = "\n".join(headers()[name] for name in names)
    found = set(re.findall(r"\b(weft_\w+)\(", re.sub(r"/\*.*?\*/|#define[^\n]*(\\\n[^\n]*)*", "", text, flags=re.S)))
    for op in re.findall(r"^WEFT_C_OP\((\w+)\)", text, flags=re.M):
        found |= {f"weft_{op}", f"weft_{op}_scratch_bytes", f"weft_{op}_choose"}
    inline = set(re.findall(r"static inline \w+ (weft_\w+)\(", text))
    return found - inline


def exported(library):
    """(type, demangled name) of the dynamic symbols that a library defines."""
    lines = run("nm", "-D", "--defined-only", "-C", library).splitlines()
    return [tuple(line.split(None, 2)[1:]) for line in lines if len(line.split(None, 2)) == 3]


def qualified(name):
    """weft::Model::load of "weft::Model::load(std::filesystem::path const&, ...) [clone]": without parameters."""
    return re.split(r"[(<\[@]", name)[0].strip()


def declared(name, text):
    """Does a public header know every part of weft::A::b?"""
    parts = qualified(name).replace("typeinfo name for ", "").replace("typeinfo for ", "").replace("vtable for ", "").split("::")
    return parts[0] == "weft" and all(re.search(rf"(?<!\w){re.escape(part.lstrip('~'))}(?!\w)", text) for part in parts[1:])


def header_text():
    """The public headers without comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", "\n".join(headers().values()), flags=re.S)


def compare(library, found, wanted, of_found, of_wanted):
    """Names every symbol that only one of two sets has."""
    for name in sorted(found - wanted):
        fault(f"{library.name} exports {name}, {of_found}")
    for name in sorted(wanted - found):
        fault(f"{library.name} does not export {name}, {of_wanted}")


def check_shared(build, update):
    library = build / "libweft.so"
    if "SONAME" not in run("readelf", "-d", library):
        fault(f"{library.name} has no SONAME")
    text = header_text()
    c_names = c_functions("c.h")
    strong, seen_c = set(), set()
    for kind, name in exported(library):
        if name in c_names:
            seen_c.add(name)
        elif not declared(name, text):
            fault(f"{library.name} exports {name}, which no header in include/weft declares")
        elif kind in "TDRB":  # weak ones are copies of inline functions, which compilers make as they like
            strong.add(name)
    compare(library, seen_c, c_names, "", "which weft/c.h declares")
    made = "".join(name + "\n" for name in sorted(strong))
    if update:
        LIST.write_text(made)
    listed = set(LIST.read_text().splitlines())
    compare(library, strong, listed, f"which is not in tests/exports.txt (tests/binaries_test.py exports {build} --update)",
            "which is in tests/exports.txt: programs that call it do not link")
    print(f"{library.name}: {len(strong)} C++ functions, {len(seen_c)} C functions")


def check_c(build):
    library = build / "libweft_c.so"
    names, wanted = {name for _, name in exported(library)}, c_functions("c.h", "c_model.h")
    compare(library, names, wanted, "which no C header declares", "which a C header declares")
    print(f"{library.name}: {len(names)} C functions")


def check_archives(build):
    """Objects of an archive may define visible symbols only for what a header declares: other libraries would export the rest again."""
    text = header_text()
    c_names = c_functions("c.h", "c_model.h")
    for archive in sorted(build.glob("libweft*.a")):
        if archive.name in ("libweft_cases.a", "libweft_serve.a"):  # not installed
            continue
        visible = hidden = 0
        symbols = []
        for line in run("readelf", "-sW", archive).splitlines():
            columns = line.split()
            if len(columns) < 8 or columns[4] != "GLOBAL" or columns[6] == "UND":
                continue
            if columns[5] == "HIDDEN":
                hidden += 1
            else:
                visible += 1
                symbols.append(columns[7])
        names = subprocess.run(["c++filt"], input="\n".join(symbols), check=True, capture_output=True, text=True).stdout.splitlines()
        for name in sorted(set(names)):
            if name not in c_names and not declared(name, text):
                fault(f"{archive.name} has the visible symbol {name}, which no header in include/weft declares")
        print(f"{archive.name}: {visible} visible symbols, {hidden} hidden ones")


def has_property(path):
    notes = run("readelf", "-nW", path)
    return "IBT" in notes and "SHSTK" in notes


def unmarked_objects(archive):
    """How many objects an archive has, and which of them carry no control-flow marks."""
    parts = [part for part in run("readelf", "-nW", archive).split("File: ")[1:] if part.splitlines()[0].endswith((".cc.o)", ".cu.o)"))]
    return len(parts), [part.splitlines()[0] for part in parts if "IBT" not in part or "SHSTK" not in part]


def check_objects(build, compiler):
    """Programs carry the control-flow marks only where the C library does. The objects of Weft carry them always."""
    for archive in sorted(build.glob("libweft*.a")):
        count, unmarked = unmarked_objects(archive)
        if unmarked:
            fault(f"{unmarked[0]} and {len(unmarked) - 1} more are not marked for control-flow protection (IBT, SHSTK)")
        print(f"{archive.name}: {count} objects, {len(unmarked)} without control-flow marks")
    with tempfile.TemporaryDirectory() as work:
        source, planted, archive = (pathlib.Path(work) / name for name in ("planted.cc", "planted.cc.o", "planted.a"))
        source.write_text("int planted() { return 0; }\n")
        run(compiler, "-c", "-fcf-protection=none", source, "-o", planted)
        run("ar", "rc", archive, planted)
        if unmarked_objects(archive)[0:2] != (1, [f"{archive}(planted.cc.o)"]):
            fault("an object without control-flow marks is not found")
    flags = [line for line in (build / "build.ninja").read_text().splitlines() if "-fstack-protector-strong" in line]
    for wanted in ("-fstack-clash-protection", "-D_FORTIFY_SOURCE"):
        if not flags or any(wanted not in line for line in flags):
            fault(f"not every hardened source is compiled with {wanted}")


def check_binary(path):
    """A library or a program: bound at the start, relocations read-only, no executable stack, position-independent, canaries."""
    name, dynamic, segments = path.name, run("readelf", "-dW", path), run("readelf", "-lW", path)
    if "BIND_NOW" not in dynamic and not re.search(r"FLAGS.*\bNOW\b", dynamic):
        fault(f"{name} binds lazily: no -z now")
    if "GNU_RELRO" not in segments:
        fault(f"{name} has no GNU_RELRO segment")
    stack = re.search(r"GNU_STACK.*", segments)
    if not stack or re.search(r"\bRWE\b", stack.group()):
        fault(f"{name} has an executable stack")
    if "DYN" not in run("readelf", "-hW", path):
        fault(f"{name} is not position-independent")
    if "TEXTREL" in dynamic:
        fault(f"{name} has text relocations")
    imports = run("nm", "-D", "--undefined-only", path)
    if "__stack_chk_fail" not in imports:
        fault(f"{name} has no stack protector")
    if not re.search(r"__\w+_chk\b", imports.replace("__stack_chk_fail", "")):
        fault(f"{name} has no checked function of _FORTIFY_SOURCE")


def check_hardening(build, compiler, cuda):
    if "x86-64" in run(compiler, "-dumpmachine").replace("_", "-"):
        check_objects(build, compiler)
    with tempfile.TemporaryDirectory() as work:
        # Does this tool chain mark what it links? All objects must be marked, those of the C library included.
        probe = pathlib.Path(work) / "probe.cc"
        probe.write_text("int probe() { return 0; }\n")
        made = subprocess.run([compiler, "-shared", "-fPIC", "-fcf-protection=full", probe, "-o", probe.with_suffix(".so")], capture_output=True)
        marks = made.returncode == 0 and has_property(probe.with_suffix(".so"))
    for name in ("weft", "libweft.so", "libweft_c.so"):
        path = build / name
        if not path.exists():
            print(f"skipped {name}: not built")
            continue
        check_binary(path)
        if not marks:
            print(f"skipped control-flow marks of {name}: this tool chain does not mark its own objects")
        elif cuda == "ON":
            print(f"skipped control-flow marks of {name}: the CUDA runtime inside is not marked")
        elif not has_property(path):
            fault(f"{name} is not marked for control-flow protection (IBT, SHSTK)")
        print(f"{name}: full RELRO, no executable stack, stack protector")


def main():
    build = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "exports":
        check_shared(build, "--update" in sys.argv)
        check_c(build)
        check_archives(build)
    else:
        check_hardening(build, sys.argv[3], sys.argv[4])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
