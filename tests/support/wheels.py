"""Small wheels and source distributions, made by hand: an index for uv that needs no network."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

_BACKEND = """\
import zipfile
{code}
def build_wheel(folder, config_settings=None, metadata_directory=None):
    info = "{name}-{version}.dist-info"
    with zipfile.ZipFile(f"{{folder}}/{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("{name}.py", f"TEXT = {{TEXT!r}}")
        wheel.writestr(f"{{info}}/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
        wheel.writestr(f"{{info}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{{info}}/RECORD", "")
    return f"{name}-{version}-py3-none-any.whl"
"""


def make_sdist(folder: Path, name: str, version: str, code: str) -> Path:
    """A source distribution whose build runs this code, which sets TEXT: the content of its one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}.tar.gz"
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": _BACKEND.format(code=code, name=name, version=version),
    }
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            member = tarfile.TarInfo(f"{name}-{version}/{file}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def make_wheel(folder: Path, name: str, version: str, source: str) -> Path:
    """A wheel with one module of the package's own name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(file, text)
    return path
