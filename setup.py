"""Maps the two top-level folders `backends/` and `conformance/` under the portattn namespace.

Everything else is in pyproject.toml. docs/adr/0002-packaging-map.md says why this file exists.
"""

from setuptools import find_packages, setup

PREFIXES = {
    "portattn": "portattn",
    "backends": "portattn.backends",
    "conformance": "portattn.conformance",
}


def mapped() -> list[str]:
    """Every package below the three folders, under its import name."""
    names = []
    for folder, name in PREFIXES.items():
        names.append(name)
        names += [f"{name}.{sub}" for sub in find_packages(folder)]
    return names


setup(
    packages=mapped(),
    package_dir={name: folder for folder, name in PREFIXES.items()},
    package_data={
        "": ["py.typed", "*.json", "tuned/*.json", "*.cu", "*.cuh", "*.html", "*.css", "*.js"]
    },
)
