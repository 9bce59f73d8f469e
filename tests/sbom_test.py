#!/usr/bin/env python3
"""Checks the SPDX file that scripts/sbom.py writes, and that NOTICE and CMake name the same dependencies."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
faults = []


def expect(good, what):
    if not good:
        faults.append(what)


def make(folder, name):
    path = Path(folder) / name
    subprocess.run([sys.executable, ROOT / "scripts/sbom.py", "-o", path], check=True, stdout=subprocess.DEVNULL)
    return path.read_text()


with tempfile.TemporaryDirectory() as folder:
    text = make(folder, "a.json")
    expect(text == make(folder, "b.json"), "two runs write different files")
spdx = json.loads(text)

# Fields that SPDX 2.3 requires.
for key in ("spdxVersion", "dataLicense", "SPDXID", "name", "documentNamespace", "creationInfo"):
    expect(spdx.get(key), f"the document has no {key}")
expect(spdx["spdxVersion"] == "SPDX-2.3" and spdx["dataLicense"] == "CC0-1.0" and spdx["SPDXID"] == "SPDXRef-DOCUMENT", "wrong header")
expect(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", spdx["creationInfo"]["created"]), "created is no date")
expect(all(re.match(r"(Tool|Organization|Person): .", who) for who in spdx["creationInfo"]["creators"]), "creators are malformed")
for package in spdx["packages"]:
    for key in ("SPDXID", "name", "versionInfo", "downloadLocation", "licenseConcluded", "licenseDeclared", "copyrightText"):
        expect(package.get(key), f"package {package.get('name')} has no {key}")
    expect(package["filesAnalyzed"] is False, f"package {package['name']} claims analysed files")
# Not every text behind the weights is shown to be free: SOURCES.md of the model.
expect(all(package["licenseConcluded"] == "NOASSERTION" for package in spdx["packages"] if package["name"] == "weft-11m"),
       "the licence of the bundled model is concluded")
expect(all(file["licenseConcluded"] == "NOASSERTION" for file in spdx["files"] if file["fileName"].endswith(".safetensors")),
       "the licence of the weights is concluded")
for file in spdx["files"]:
    expect(file["fileName"].startswith("./") and (ROOT / file["fileName"]).is_file(), f"there is no {file['fileName']}")
    expect({c["algorithm"] for c in file["checksums"]} >= {"SHA1"}, f"{file['fileName']} has no SHA1")

# Identifiers are unique and well formed, relationships lead to something, everything is reached.
ids = ["SPDXRef-DOCUMENT"] + [entry["SPDXID"] for entry in spdx["packages"] + spdx["files"]]
expect(len(ids) == len(set(ids)), "identifiers are not unique")
for key in ids:
    expect(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", key), f"{key} is no identifier")
reached = set()
for relation in spdx["relationships"]:
    for key in (relation["spdxElementId"], relation["relatedSpdxElement"]):
        expect(key in ids, f"a relationship names {key}, which is not there")
        reached.add(key)
expect(reached == set(ids), f"no relationship names {set(ids) - reached}")
licences = {entry["licenseId"] for entry in spdx["hasExtractedLicensingInfos"]}
for package in spdx["packages"]:
    for key in re.findall(r"LicenseRef-[A-Za-z0-9.-]+", package["licenseDeclared"]):
        expect(key in licences, f"{package['name']} has the licence {key}, whose text is not there")

# NOTICE names the same dependencies, and CMake finds no others.
notice = (ROOT / "NOTICE").read_text()
names = {package["name"] for package in spdx["packages"]} - {"Weft", "weft-11m"}
for name in names:
    expect(re.search(rf"^  {re.escape(name)}\s", notice, re.MULTILINE), f"NOTICE does not name {name}")
known = {"hwy": "Highway", "OpenMP": "GCC runtime", "nlohmann_json": "JSON for Modern C++", "Boost": "Boost", "CLI11": "CLI11", "fmt": "fmt",
         "GTest": "GoogleTest", "CUDAToolkit": "CUDA runtime", "utf8proc": "utf8proc", "xxhash": "xxHash", "histedit": "libedit",
         "vulkan": "Vulkan loader",
         "Python3": None, "Threads": None, "weft": None}  # nothing to name
for path in [ROOT / "CMakeLists.txt", *ROOT.glob("cmake/*.cmake"), *ROOT.glob("*/CMakeLists.txt")]:
    for found in re.findall(r"find_package\((\w+)|find_library\(\w+ (\w+)|find_path\(\w+ (\w+)", path.read_text()):
        library = found[0] or found[1] or found[2]
        expect(library in known, f"{path.relative_to(ROOT)} finds {library}, which NOTICE and scripts/sbom.py do not know")
        expect(known.get(library) is None or known[library] in names, f"scripts/sbom.py does not list {library}")

for fault in faults:
    print("sbom_test:", fault)
print(f"sbom_test: {len(spdx['packages'])} packages, {len(spdx['files'])} files, {len(faults)} faults")
sys.exit(bool(faults))
