"""A bill of materials of preheat: ``python -m tools.sbom > FILE``.

It lists preheat and all its dependencies, as installed here. CycloneDX 1.6 in JSON, from the metadata of the installed
packages. Packages that only extras need are left out. The same packages give the same bytes.
"""

import json
import re
import sys
from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "preheat"


def needed(name: str) -> dict[str, Distribution]:
    """Return the package ``name`` and its dependencies on this machine, by canonical name.

    Raises PackageNotFoundError for a package that is not installed.
    """
    found: dict[str, Distribution] = {}
    left = [name]
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found[name] = distribution(name)
            left += requirements(found[name])
    return found


def requirements(package: Distribution) -> list[str]:
    """Return the packages that ``package`` needs on this machine, its extras left out."""
    lines = [Requirement(line) for line in package.requires or ()]
    return [line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]


def component(package: Distribution, kind: str = "library") -> dict[str, object]:
    name = canonicalize_name(package.metadata["Name"])
    found: dict[str, object] = {"type": kind, "bom-ref": ref(package), "name": name, "version": package.version}
    if text := package.metadata.get("Summary"):
        found["description"] = text
    if licenses := licenses_of(package):
        found["licenses"] = licenses
    return {**found, "purl": ref(package)}


def ref(package: Distribution) -> str:
    """Return the package's URL; others refer to the package by it, too."""
    version = package.version.replace("+", "%2B")
    return f"pkg:pypi/{canonicalize_name(package.metadata['Name'])}@{version}"


def licenses_of(package: Distribution) -> list[dict[str, object]]:
    """Return the package's licenses.

    It is an SPDX expression, or else the licenses in its classifiers or its field "License".
    """
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = metadata.get_all("Classifier") or []
    names = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: OSI Approved ::")]
    if not names and (text := metadata.get("License")):
        names = [re.split(r"[\r\n]", text.strip())[0][:80]]
    return [{"license": {"name": name}} for name in names]


def bill(name: str = NAME) -> dict[str, object]:
    """Return the document."""
    packages = needed(name)
    own = packages[name]
    others = [packages[each] for each in sorted(packages) if each != name]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(own, "application")},
        "components": [component(each) for each in others],
        "dependencies": [
            {
                "ref": ref(each),
                "dependsOn": sorted({ref(packages[canonicalize_name(line)]) for line in requirements(each)}),
            }
            for each in (own, *others)
        ],
    }


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=2)
    print()
