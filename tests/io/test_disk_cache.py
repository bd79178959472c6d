"""The cache on disk: what was written is read, and nothing that another user could have put in."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from qfx.io import disk_cache
from qfx.io.disk_cache import DiskCache, user_folder

NAMES = re.compile(r"[a-z]+\.bin")
KEY, DATA = "key.bin", b"data"
OTHER = 12345  # a user
ROOT = os.geteuid() == 0


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", NAMES, 3)


def given_away(path: Path) -> None:
    if not ROOT:
        pytest.skip("only root can give a file to another user")
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def names_in(cache: DiskCache) -> set[str]:
    return {*os.listdir(cache.folder)}


def test_what_was_written_is_read(cache: DiskCache) -> None:
    before = os.umask(0)
    try:
        for data in (b"", DATA, bytes(range(256)) * 4096):
            cache.write(KEY, data)
            assert cache.read(KEY) == data and names_in(cache) == {KEY}
    finally:
        os.umask(before)
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert (cache.folder / KEY).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError):
        cache.read("other.bin")


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda whole: b"",
    "a beginning": lambda whole: whole[:20],
    "one byte less": lambda whole: whole[:-1],
    "one byte more": lambda whole: whole + b"x",
    "one bit of the data": flipped,
    "one bit of the digest": lambda whole: flipped(whole[:20]) + whole[20:],
    "another format": lambda whole: whole.replace(b"cache 1", b"cache 2"),
    "the data alone": lambda whole: DATA,
    "zeros": lambda whole: bytes(len(whole)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_and_replaced(name: str, cache: DiskCache) -> None:
    cache.write(KEY, DATA)
    path = cache.folder / KEY
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with pytest.raises(ValueError, match=r"key\.bin is cut off, damaged or a file of another key"):
        cache.read(KEY)
    cache.write(KEY, DATA)
    assert cache.read(KEY) == DATA


def test_the_file_of_another_key_is_refused(cache: DiskCache) -> None:
    cache.write(KEY, DATA)
    (cache.folder / KEY).rename(cache.folder / "other.bin")
    with pytest.raises(ValueError, match="a file of another key"):
        cache.read("other.bin")


# --- other users: (a change of the folder or of a file, the error of reading) ---


def link_to_victim(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parents[1] / "victim")


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parents[1] / "missing")


def link_to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


FILES: dict[str, Callable[[Path], object]] = {
    "a link to a file of the user": link_to_victim,
    "a link to nothing": link_to_nothing,
    "a link to a device": link_to_device,
    "a fifo": fifo,
    "writable by the group": lambda path: path.chmod(0o620),
    "writable by all": lambda path: path.chmod(0o602),
    "of another user": given_away,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_could_be_anothers_is_not_read_and_is_replaced(
    name: str, cache: DiskCache, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("of the user")
    cache.write(KEY, DATA)
    path = cache.folder / KEY
    FILES[name](path)
    with pytest.raises((ValueError, OSError), match=r"another user|symbolic link|levels of"):
        cache.read(KEY)
    cache.write(KEY, DATA)
    assert cache.read(KEY) == DATA and path.is_file() and not path.is_symlink()
    assert victim.read_text() == "of the user" and not (tmp_path / "missing").exists()
    assert path.stat().st_mode & 0o777 == 0o600 and names_in(cache) == {KEY}


def linked(folder: Path, owner: int | None = None) -> None:
    """The folder is a link to itself elsewhere; to that of another user, or made by one."""
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def linked_to_anothers(folder: Path) -> None:
    linked(folder)
    given_away(folder.with_name("elsewhere"))


def linked_by_another(folder: Path) -> None:
    linked(folder)
    given_away(folder)


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "writable by the group": (lambda f: f.chmod(0o770), "may write to .*: its mode is 770"),
    "writable by all": (lambda f: f.chmod(0o1777), "may write to .*: its mode is 1777"),
    "of another user": (given_away, f"belongs to user {OTHER}, not to user"),
    "a link to another user's": (linked_to_anothers, f"belongs to user {OTHER}"),
    "a link that another user made": (linked_by_another, f"belongs to user {OTHER}"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_others_can_write_to_is_refused(
    name: str, cache: DiskCache, tmp_path: Path
) -> None:
    cache.write(KEY, DATA)
    whole = (cache.folder / KEY).read_bytes()
    change, why = FOLDERS[name]
    change(cache.folder)
    uses: list[Callable[[], object]] = [
        lambda: cache.read(KEY),
        lambda: cache.write(KEY, b"other"),
        lambda: DiskCache(cache.folder, NAMES, 3),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=why):
            use()
    assert (cache.folder / KEY).read_bytes() == whole and names_in(cache) == {KEY}


def test_a_link_to_a_folder_of_ones_own_is_followed(cache: DiskCache) -> None:
    cache.write(KEY, DATA)
    linked(cache.folder)
    assert cache.read(KEY) == DATA


@pytest.mark.parametrize("place", ["file/cache", "file"])
def test_where_no_folder_can_be_is_an_error_of_the_system(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        DiskCache(tmp_path / place, NAMES, 3)


def test_the_folder_of_the_user_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "qfx").mkdir()
    (tmp_path / "qfx").chmod(0o777)
    assert user_folder() == tmp_path / "qfx"
    assert (tmp_path / "qfx").stat().st_mode & 0o777 == 0o700


# --- eviction, and several writers ---


def aged(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))


def test_those_that_were_not_used_for_longest_go(cache: DiskCache) -> None:
    """Links and pipes under names of keys count too; folders and other files stay."""
    for age, key in enumerate(("c.bin", "b.bin", "a.bin")):
        cache.write(key, DATA)
        aged(cache.folder / key, 1000 - age)
    for name in ("notes.txt", ".hidden"):
        (cache.folder / name).touch()
        aged(cache.folder / name, 1)
    (cache.folder / "folder.bin").mkdir()
    (cache.folder / "link.bin").symlink_to("nowhere")
    os.utime(cache.folder / "link.bin", (2, 2), follow_symlinks=False)
    cache.read("a.bin")  # is of use
    cache.write("d.bin", DATA)
    others = {"notes.txt", ".hidden", "folder.bin"}
    assert names_in(cache) == others | {"a.bin", "c.bin", "d.bin"}


def test_partial_files_of_processes_that_died_go(cache: DiskCache) -> None:
    old, new = (cache.folder / f".{digit * 16}.partial" for digit in "ab")
    old.write_bytes(DATA)
    aged(old, new.parent.stat().st_mtime - 2 * disk_cache._STALE)
    new.write_bytes(DATA)  # of a process that is still writing
    cache.write(KEY, DATA)
    assert names_in(cache) == {KEY, new.name}


def test_a_write_that_fails_leaves_the_old_file(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write(KEY, DATA)

    def full(*args: object, **others: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        cache.write(KEY, b"other")
    assert cache.read(KEY) == DATA and names_in(cache) == {KEY}


def test_writers_and_readers_at_once(cache: DiskCache) -> None:
    """Of keys that evict each other: a reader finds whole data of its key, or none."""
    keys = ["a.bin", "b.bin", "c.bin", "d.bin"]
    wrong: list[object] = []

    def use(own: str) -> None:
        for i in range(50):
            cache.write(own, own.encode() + bytes(i))
            for key in keys:
                try:
                    if not cache.read(key).startswith(key.encode()):
                        wrong.append(key)
                except FileNotFoundError:
                    continue
                except (OSError, ValueError) as why:
                    wrong.append(why)

    threads = [threading.Thread(target=use, args=[key]) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and names_in(cache) <= {*keys} and len(names_in(cache)) <= 4
