#!/usr/bin/env python3
"""Writes an SPDX 2.3 list of Weft, its dependencies as found on this machine, and the bundled model (`make sbom`).

    scripts/sbom.py [-o build/weft.spdx.json]

Versions come from dpkg and, for the CUDA toolkit, from its version.json or from nvcc. A dependency that is not installed is listed
with the version NOASSERTION. NOTICE names the same dependencies in words; tests/sbom_test.py holds both lists together.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NONE = "NOASSERTION"

# name, Debian packages (the first that is installed counts), licence, relation to Weft, homepage
DEPENDENCIES = [
    ("Highway", ["libhwy1", "libhwy-dev"], "Apache-2.0", "DEPENDS_ON", "https://github.com/google/highway"),
    ("GCC runtime", ["libgomp1", "libstdc++6"], "GPL-3.0-or-later WITH GCC-exception-3.1", "DEPENDS_ON", "https://gcc.gnu.org"),
    ("JSON for Modern C++", ["nlohmann-json3-dev"], "MIT", "DEPENDS_ON", "https://github.com/nlohmann/json"),
    ("xxHash", ["libxxhash0", "libxxhash-dev"], "BSD-2-Clause", "DEPENDS_ON", "https://github.com/Cyan4973/xxHash"),
    ("utf8proc", ["libutf8proc2", "libutf8proc-dev"], "MIT AND LicenseRef-Unicode-data", "DEPENDS_ON",
     "https://github.com/JuliaStrings/utf8proc"),
    ("Boost", ["libboost1.74-dev", "libboost-dev"], "BSL-1.0", "DEPENDS_ON", "https://www.boost.org"),
    ("CLI11", ["libcli11-dev"], "BSD-3-Clause", "DEPENDS_ON", "https://github.com/CLIUtils/CLI11"),
    ("fmt", ["libfmt9", "libfmt-dev"], "MIT", "DEPENDS_ON", "https://github.com/fmtlib/fmt"),
    ("Vulkan loader", ["libvulkan1", "libvulkan-dev"], "Apache-2.0", "RUNTIME_DEPENDENCY_OF",
     "https://github.com/KhronosGroup/Vulkan-Loader"),
    ("libedit", ["libedit2", "libedit-dev"], "BSD-3-Clause", "RUNTIME_DEPENDENCY_OF", "https://www.thrysoee.dk/editline/"),
    ("ggml", [], "MIT", "OPTIONAL_DEPENDENCY_OF", "https://github.com/ggml-org/ggml"),
    ("GoogleTest", ["libgtest-dev"], "BSD-3-Clause", "TEST_DEPENDENCY_OF", "https://github.com/google/googletest"),
]
CUDA = ("CUDA runtime", "LicenseRef-NVIDIA-CUDA-EULA", "OPTIONAL_DEPENDENCY_OF", "https://docs.nvidia.com/cuda/eula/")
CUBLAS = ("cuBLASLt", "LicenseRef-NVIDIA-CUDA-EULA", "RUNTIME_DEPENDENCY_OF", "https://docs.nvidia.com/cuda/eula/")

EXTRACTED = [
    ("LicenseRef-NVIDIA-CUDA-EULA", "NVIDIA CUDA Toolkit EULA", "The text is at https://docs.nvidia.com/cuda/eula/"),
    ("LicenseRef-Unicode-data", "Unicode data files in utf8proc", "The text is in the file NOTICE, section 'Data in utf8proc: Unicode'."),
]


def output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def debian_version(packages):
    for package in packages:
        # One line per architecture; all have the same version.
        found = output_of("dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}\n", package)
        for line in found.splitlines():
            status, _, version = line.partition(" ")
            if status == "installed":
                return package, version
    return None, NONE


def cuda_versions():
    """Versions of the CUDA runtime and of cuBLASLt, or NOASSERTION."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    version_file = Path(os.path.realpath(nvcc)).parent.parent / "version.json"
    try:
        parts = json.loads(version_file.read_text())
        return parts.get("cuda_cudart", {}).get("version", NONE), parts.get("libcublas", {}).get("version", NONE)
    except (OSError, ValueError):
        found = re.search(r"\bV([0-9.]+)", output_of(nvcc, "--version"))
        return (found.group(1) if found else NONE), NONE


def weft_version():
    text = (ROOT / "include/weft/version.h").read_text()
    return ".".join(re.search(rf"WEFT_VERSION_{part} +(\d+)", text).group(1) for part in ("MAJOR", "MINOR", "PATCH"))


def identifier(name):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.]+", "-", name)


def package(name, version, licence, homepage, **more):
    return {
        "SPDXID": identifier("Package-" + name),
        "name": name,
        "versionInfo": version,
        "supplier": NONE,
        "downloadLocation": NONE,
        "filesAnalyzed": False,
        "licenseConcluded": licence,
        "licenseDeclared": licence,
        "copyrightText": NONE,
        "homepage": homepage,
    } | more


def file_entry(path):
    data = path.read_bytes()
    relative = path.relative_to(ROOT).as_posix()
    return {
        "SPDXID": identifier("File-" + relative),
        "fileName": "./" + relative,
        "checksums": [{"algorithm": "SHA1", "checksumValue": hashlib.sha1(data).hexdigest()},
                      {"algorithm": "SHA256", "checksumValue": hashlib.sha256(data).hexdigest()}],
        # Whether every text that the weights and the excerpt come from is free is not recorded: models/weft-11m/SOURCES.md.
        "licenseConcluded": NONE if path.suffix in (".md", ".txt", ".safetensors") else "Apache-2.0",
        "copyrightText": NONE,
    }


def document():
    version = weft_version()
    # The date of the commit: the same sources on the same machine give the same file.
    stamp = os.environ.get("SOURCE_DATE_EPOCH") or output_of("git", "-C", str(ROOT), "log", "-1", "--format=%ct").strip() or "0"
    created = datetime.datetime.fromtimestamp(int(stamp), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    commit = output_of("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
    weft = package("Weft", version, "Apache-2.0", NONE, **({"sourceInfo": "commit " + commit} if commit else {}))
    model = package("weft-11m", version, "Apache-2.0", NONE,
                    licenseConcluded=NONE,
                    comment="The bundled model. What is recorded of its training text: models/weft-11m/SOURCES.md.")
    packages, relations = [weft, model], []

    def relate(a, kind, b):
        relations.append({"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b})

    relate("SPDXRef-DOCUMENT", "DESCRIBES", weft["SPDXID"])
    relate(weft["SPDXID"], "CONTAINS", model["SPDXID"])
    for name, names, licence, kind, homepage in DEPENDENCIES:
        found, installed = debian_version(names)
        more = {"externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                                  "referenceLocator": f"pkg:deb/debian/{found}@{installed}"}]} if found else {}
        packages.append(package(name, installed, licence, homepage, **more))
        if kind == "DEPENDS_ON":
            relate(weft["SPDXID"], kind, packages[-1]["SPDXID"])
        else:
            relate(packages[-1]["SPDXID"], kind, weft["SPDXID"])
    for (name, licence, kind, homepage), installed in zip((CUDA, CUBLAS), cuda_versions()):
        packages.append(package(name, installed, licence, homepage))
        relate(packages[-1]["SPDXID"], kind, weft["SPDXID"])
    files = [file_entry(path) for path in sorted((ROOT / "models/weft-11m").iterdir()) if path.is_file()]
    for entry in files:
        relate(model["SPDXID"], "CONTAINS", entry["SPDXID"])
    content = json.dumps([packages, files, relations], sort_keys=True)
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": "weft-" + version,
        "documentNamespace": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, content)}",
        "creationInfo": {"created": created, "creators": ["Tool: weft-sbom"]},
        "documentDescribes": [weft["SPDXID"]],
        "packages": packages,
        "files": files,
        "relationships": relations,
        "hasExtractedLicensingInfos": [{"licenseId": key, "name": name, "extractedText": text} for key, name, text in EXTRACTED],
    }


def main():
    parser = argparse.ArgumentParser(description="Writes an SPDX 2.3 list of Weft and its dependencies.")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/weft.spdx.json")
    output = parser.parse_args().output
    made = document()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    unknown = [p["name"] for p in made["packages"] if p["versionInfo"] == NONE]
    print(f"{output}: {len(made['packages'])} packages, {len(made['files'])} files"
          + (f"; not found on this machine: {', '.join(unknown)}" if unknown else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
