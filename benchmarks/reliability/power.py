"""The power goes: what was not synced may be lost, and the run must still go on to the same bits.

    python benchmarks/reliability/power.py [--every 1] [--write]           # needs strace

Every file-system call of a run is recorded with its data and replayed in a model of a disk that keeps
what POSIX promises and no more: a file's content as of its last fsync, the names in a folder as of
the folder's. After each call the power goes, in three ways: nothing that was not synced survives;
names survive and contents do not; any part of either survives. covey goes on in what is left.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from disk import SETTINGS, traced
from harness import child, covey, fingerprint, report, wait, warm_up, write_config

CALLS = "openat,write,lseek,fsync,rename,renameat,mkdir,unlink,unlinkat,rmdir,ftruncate,truncate"
WAYS = ("nothing unsynced survives", "names survive", "any part survives")


class Call(NamedTuple):
    """A call that succeeded, and what it was about."""

    name: str
    paths: list[Path]
    data: bytes
    rest: str
    result: int


def recorded(log: Path) -> Iterator[Call]:
    """The calls that strace has written down, strings and paths in hexadecimal."""
    for line in log.read_text().splitlines():
        if not (found := re.match(r"(\w+)\((.*)\) += (\d+)", line)):
            continue
        texts, places = (
            [bytes.fromhex(t.replace("\\x", "")) for t in re.findall(pattern, found[2])]
            for pattern in ('"([^"]*)"', "<([^>]*)>")
        )
        rest = re.sub('"[^"]*"|<[^>]*>', "", found[2])
        data = texts.pop() if found[1] == "write" else b""
        where = [Path(p.decode()) for p in places] or [Path("/")] * len(texts)
        paths = [w / t.decode() for w, t in zip(where, texts, strict=True)] if texts else where
        yield Call(found[1], paths, data, rest, int(found[3]))


class File:
    """A file's content now, and as of its last fsync."""

    def __init__(self) -> None:
        self.now, self.kept = b"", b""

    def sync(self) -> None:
        """From here on the content survives."""
        self.kept = self.now

    def parts(self, rng: random.Random) -> list[bytes]:
        """What may survive: none, all or some of what was not synced."""
        first = len(self.kept) if self.now.startswith(self.kept) else 0
        return [self.kept, self.now, self.now[: rng.randint(first, len(self.now))]]


class Folder:
    """The names in a folder at its last fsync and after every change since."""

    def __init__(self) -> None:
        self.names: list[dict[str, Any]] = [{}]

    def sync(self) -> None:
        """From here on these names survive."""
        del self.names[:-1]


class Disk:
    """What lies below one folder, which itself is safe."""

    def __init__(self, top: Path) -> None:
        self.top, self.root = top, Folder()
        self.offsets: dict[Path, int] = {}

    def find(self, path: Path) -> Any:
        """The file or folder of a path; None where nothing is."""
        node: Any = self.root
        for name in path.relative_to(self.top).parts:
            node = node and node.names[-1].get(name)
        return node

    def put(self, path: Path, node: File | Folder | None) -> None:
        """Give a path to something; to nothing: take it away."""
        folder = self.find(path.parent)
        kept = {k: v for k, v in folder.names[-1].items() if k != path.name}
        folder.names.append(kept if node is None else {**kept, path.name: node})

    def apply(self, call: Call) -> bool:
        """Let a call have its effect; whether it has one on the disk."""
        name, path, rest = call.name, call.paths[-1], call.rest
        if not path.is_relative_to(self.top):
            return False
        node = self.find(path)
        if name == "lseek":
            self.offsets[path] = call.result
        elif name == "write":
            at = self.offsets[path]
            node.now = node.now[:at].ljust(at, b"\0") + call.data + node.now[at + len(call.data) :]
            self.offsets[path] = at + len(call.data)
        elif name in ("ftruncate", "truncate"):
            size = int(rest.split(",")[-1])
            node.now = node.now[:size].ljust(size, b"\0")
        elif name == "fsync":
            node.sync()
        elif name == "mkdir":
            self.put(path, Folder())
        elif name in ("rename", "renameat"):
            self.put(path, self.find(call.paths[0]))
            self.put(call.paths[0], None)
        elif name == "openat":
            return self._open(path, node, rest)
        else:
            self.put(path, None)
        return name != "lseek"

    def _open(self, path: Path, node: Any, flags: str) -> bool:
        if node is None:
            node = File()
            self.put(path, node)
        elif "O_TRUNC" in flags:
            node.now = b""
        self.offsets[path] = len(node.now) if "O_APPEND" in flags else 0
        return "O_CREAT" in flags

    def left(self, way: str, rng: random.Random) -> dict[Path, bytes | None]:
        """What a power loss leaves: contents by relative path, None for folders."""
        found: dict[Path, bytes | None] = {}

        def visit(node: File | Folder, path: Path) -> None:
            if isinstance(node, File):
                found[path] = rng.choice(node.parts(rng)) if way == WAYS[2] else node.kept
                return
            found[path] = None
            names = rng.choice(node.names) if way == WAYS[2] else node.names[-(way == WAYS[1])]
            for name, inside in sorted(names.items()):
                visit(inside, path / name)

        visit(self.root, Path())
        return found


def write_out(state: dict[Path, bytes | None], folder: Path) -> None:
    """Make a folder that holds this."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in state.items():
        (folder / path).mkdir() if content is None else (folder / path).write_bytes(content)


def states(log: Path, disk: Disk, every: int) -> Iterator[tuple[str, dict[Path, bytes | None]]]:
    """What a loss of power after every ``every``-th call may leave, each once, with words for when."""
    seen, rng = set[bytes](), random.Random(0)
    for number, call in enumerate(call for call in recorded(log) if disk.apply(call)):
        for way in WAYS if number % every == 0 else ():
            state = disk.left(way, rng)
            digest = hashlib.sha256(repr(sorted(state.items())).encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield f"{number} {call.name} {call.paths[-1].name}: {way}", state


def lose_power(config: Path, whole: str, every: int) -> Counter[str]:
    """Let the power go again and again, and covey go on."""
    top, left, log = (config.parent / name for name in ("top", "left", "log"))
    top.mkdir()
    traced(config, top / "run", "-o", str(log), "-y", "-xx", "-s", "1000000000", "-e", f"trace={CALLS}")
    disk, total = Disk(top), Counter[str]()
    for when, state in states(log, disk, every):
        write_out(state, left)
        errors = config.parent / "errors"
        code = wait(child(covey("train", str(config), "--output", str(left / "run"), errors=errors)))
        same = code in (0, 1) and fingerprint(left / "run") == whole
        total["states"] += 1
        total["identical"] += same
        if not same:
            print("DIFFERS", when, code, errors.read_text(errors="replace")[-300:], flush=True)
    for path in (p for p in top.rglob("*") if p.is_file()):  # the model has not missed a byte
        assert disk.find(path).now == path.read_bytes(), path
    return total


def main() -> None:
    """Record, replay, go on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, help="try only every n-th call")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        config = write_config(Path(scratch).resolve() / "p", SETTINGS)
        wait(child(covey("train", str(config), "--output", str(config.parent / "run"))))
        total = lose_power(config, fingerprint(config.parent / "run"), arguments.every)
    ok = total["identical"] == total["states"] > 0
    report("power loss after every file-system call", {**total, "ok": ok}, arguments.write)
    raise SystemExit(not ok)


if __name__ == "__main__":
    main()
