"""A key folder: what is made, what is refused and by which name."""

import os
import stat
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from whalez.errors import ConfigError, OutputError
from whalez.hub.keys import load_keys, make_keys

SECRETS = ["admin.key_secret", "hub.key_secret", "rank.key_secret"]
PUBLICS = ["admins/admin.key", "hub.key", "ranks/rank.key"]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "keys"
    make_keys(made)
    return made


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_made_is_what_loads_and_secrets_are_for_one_user(tmp_path, umask):
    before = os.umask(umask)
    try:
        files = make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    found = sorted(str(path.relative_to(tmp_path / "keys")) for path in (tmp_path / "keys").rglob("*.key*"))
    assert found == sorted(SECRETS + PUBLICS) == sorted(str(path.relative_to(tmp_path / "keys")) for path in files)
    for name in SECRETS:
        assert stat.S_IMODE((tmp_path / "keys" / name).stat().st_mode) == 0o600
    keys = load_keys(tmp_path / "keys")
    assert keys.hub_public == keys.pair("hub").public
    assert keys.ranks == {keys.pair("rank").public}
    assert keys.admins == {keys.pair("admin").public}
    assert len({pair.public for pair in keys.pairs.values()}) == 3
    assert all(zmq.curve_public(pair.secret) == pair.public for pair in keys.pairs.values())
    assert all(pair.secret.decode() not in repr(keys) for pair in keys.pairs.values())


@pytest.mark.parametrize("name", ["", "ranks", "admins"])
def test_a_folder_that_others_can_write_gets_no_keys(tmp_path, name):
    folder = tmp_path / "open"
    (folder / name).mkdir(parents=True)
    (folder / name).chmod(0o777)
    with pytest.raises(ConfigError, match=r"mode 0777 lets others put keys there"):
        make_keys(folder)
    assert list(folder.rglob("*.key*")) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "x", Path("/proc/nope")):
        with pytest.raises(OutputError, match=f"{folder}: cannot be written"):
            make_keys(folder)


@pytest.mark.parametrize("name", SECRETS + PUBLICS)
def test_keys_are_never_overwritten(folder, name):
    others = [path for path in folder.rglob("*.key*") if path != folder / name]
    for path in others:
        path.unlink()
    before = (folder / name).read_bytes()
    with pytest.raises(ConfigError, match=rf"{name}: exists already"):
        make_keys(folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == [folder / name]
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644])
def test_a_secret_that_others_can_get_at_is_refused_by_name(folder, name, mode):
    (folder / name).chmod(mode)
    with pytest.raises(ConfigError, match=rf"{name}: mode {mode:04o}.*chmod 600"):
        load_keys(folder)


@pytest.mark.parametrize("name", ["", "ranks", "admins", *PUBLICS])
@pytest.mark.parametrize("bit", [0o020, 0o002])
def test_a_list_that_others_can_write_is_refused_by_name(folder, name, bit):
    path = folder / name
    path.chmod(stat.S_IMODE(path.stat().st_mode) | bit)
    with pytest.raises(ConfigError, match=rf"{path}: mode .*put keys there"):
        load_keys(folder)


@pytest.mark.parametrize("name", SECRETS + PUBLICS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"public-key = ''",
        b"public-key = 'short'",
        b"public-key = '" + b"#" * 40 + b"'",  # more than 32 bits in five characters
        b"public-key = '" + b"~" * 40 + b"'\nsecret-key = '" + b"~" * 40 + b"'",
        b"public-key = '" + z85.encode(bytes(32)) + b"'\nsecret-key = '" + b"0" * 39 + b"'",
    ],
)
def test_a_file_that_is_no_certificate_is_named(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        load_keys(folder)


def test_keys_that_do_not_belong_together_are_named(folder, tmp_path):
    make_keys(tmp_path / "other")
    ours, theirs = (each / "hub.key_secret" for each in (folder, tmp_path / "other"))
    mixed = ours.read_text().splitlines()[:-1] + theirs.read_text().splitlines()[-1:]
    (folder / "rank.key_secret").write_text("\n".join(mixed))
    with pytest.raises(ConfigError, match=r"rank\.key_secret: its public and its secret key"):
        load_keys(folder)
    (folder / "rank.key_secret").unlink()
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(ConfigError, match=r"hub\.key: not the public key of .*hub\.key_secret"):
        load_keys(folder)


def test_a_machine_holds_only_what_it_needs(folder, tmp_path):
    """rank 1's machine has no secret of the hub, and says so when it is to be rank 0."""
    for name in ("hub.key_secret", "admin.key_secret", "ranks/rank.key"):
        (folder / name).unlink()
    keys = load_keys(folder)
    assert keys.pair("rank").secret
    assert not keys.ranks
    with pytest.raises(ConfigError, match=r"hub\.key_secret: not there"):
        keys.pair("hub")
    (folder / "hub.key").unlink()
    with pytest.raises(ConfigError, match=r"hub\.key: not there"):
        load_keys(folder)
    with pytest.raises(ConfigError, match="whalez keys"):
        load_keys(tmp_path / "nowhere")
