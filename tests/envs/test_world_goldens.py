"""Generated worlds keep their bytes: a digest of each profile, language and split, with which results were made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.worlds import generate_world

# SHA-256 over corpus, questions and meta of generate_world(profile, seed=5, split=..., entities=120, questions=60,
# language=...). A change means that every published world changes: raise the format in envs/worlds/world.py then.
GOLDEN: dict[tuple[str, str, str], str] = {
    ("quickstart", "en", "train"): "f415bc3da1d96d4443f17276cd1532cd018b450090fdf142308573dd37efd951",
    ("quickstart", "en", "test"): "adb3b492eb01050c9abf1454a8c2e1896aefc63f09059c7b81e76bf43c4b9329",
    ("quickstart", "zh", "train"): "f830aed27f8b18251713df21e4fbb4aa0251492a1a411c2e32e4805b063488f5",
    ("quickstart", "zh", "test"): "94ed6f405643fc957c1d8833fbda8735bca648e4160d66a428ae1e2bac69ce5a",
    ("standard", "en", "train"): "796c41bae3d660ed9c9256eef537fed4d7ecc3229d67fea1b9714bb6a5ebafc7",
    ("standard", "en", "test"): "9b0a58c34f7fd6a644b1dc76e7498683c996cc19d3ed2135ba2792b269a8def5",
    ("standard", "zh", "train"): "d886c89fb9e87ddaa995d54a74c11c3b9c47e795767ba782498093f9d0e534a9",
    ("standard", "zh", "test"): "705bb59835e42a32e222c7466e0c27200f0bc0637ad5572b600b65e408a0ffbe",
    ("code", "en", "train"): "77205bf1c2abe8c761d8b7b41ffd1d78e078eb73b461e78b4ed069e111fd5850",
    ("code", "en", "test"): "d71de1f53e36c3af64a792b2e2a5c99a4c3a0a43a090c946efcac2a93db2e701",
    ("code", "zh", "train"): "b2dff017535635e15d778cc49c8dc893c012cf79f85ad9ad2625f4130caa755f",
    ("code", "zh", "test"): "bd1928c6000a7814286570c9694243f3e0b85b9fad45344f30249e9d0b081e13",
    ("code_prose", "en", "train"): "d2548dda4650ad3f4f85018d9caafb74ee47321316ab743cd9c99e34b59aeb07",
    ("code_prose", "en", "test"): "4bc50dd6356fabd99a2a00931a488519595ff69638eea4757e90cbdea097f918",
    ("code_prose", "zh", "train"): "1ff52eb6ec0804e1f68af48c9a1eace30c45ac5bdf278f40435a15b614ec6b83",
    ("code_prose", "zh", "test"): "913b1138e36474d98df4d02e9ac67873f85627701d462a181a723c107559624f",
}
FILES = ("corpus.jsonl", "questions.jsonl", "meta.json")


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in FILES)).hexdigest()


@pytest.mark.parametrize(("profile", "language", "split"), GOLDEN)
def test_every_profile_keeps_its_bytes_golden(profile: str, language: Any, split: Any, tmp_path: Path) -> None:
    world = generate_world(profile, seed=5, split=split, entities=120, questions=60, language=language)
    assert digest(world.save(tmp_path)) == GOLDEN[profile, language, split]
