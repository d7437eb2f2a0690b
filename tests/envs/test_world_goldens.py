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
    ("varied", "en", "train"): "c3e1bb0e2ff05f197521cc7e35c8e397d3f0146ed9ce5dd796262fd34cd7e976",
    ("varied", "en", "test"): "54816029b7fbddfc343b0963d0a124f5d17cbd784680afc567f6b487c4769e25",
    ("varied", "zh", "train"): "b1d8c3f1d94dcead57db424aed4b8a14e6f3f8113042b8f2f3716fa6ad9ba3b0",
    ("varied", "zh", "test"): "edd051314897456de7a958ccbf4e0f818473f36ee77c67c4e7be4ddc0e62fa16",
    ("musique", "en", "train"): "9013c1d4436f11afa0873fb8a8c5cc82284234037f8ee1c7daf8c1f22c5b9095",
    ("musique", "en", "test"): "5ec0c70b8fb8f62f88635364684e67ec62638ef84a337e0819d73fea7b422b72",
    ("musique", "zh", "train"): "47a745454d279773bf29f086a1f636fb684385f5c8b027ec4e390cc7e1e15874",
    ("musique", "zh", "test"): "336dd2fc534db86c3dbaee638642ad5e6eff32d7a9156ee1149f65b4625895e2",
    ("uncertain", "en", "train"): "f32dfad864f1211d214093df65b76ebda7f74b0d1df1eac4ac4ad5405623c511",
    ("uncertain", "en", "test"): "77161671512b7404a409e1b67b9513e3c1be9da4b15ab4992c73d381ae44fbf4",
    ("uncertain", "zh", "train"): "e7234cd88fc7007dc277de0e26a56d1b441a353048ef059c807d26d4ac36584d",
    ("uncertain", "zh", "test"): "23f7f94bebd0b63035cd0699754a29ad8307959e03d119f45e1b8d38fc3975cc",
}
FILES = ("corpus.jsonl", "questions.jsonl", "meta.json")


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in FILES)).hexdigest()


@pytest.mark.parametrize(("profile", "language", "split"), GOLDEN)
def test_every_profile_keeps_its_bytes_golden(profile: str, language: Any, split: Any, tmp_path: Path) -> None:
    world = generate_world(profile, seed=5, split=split, entities=120, questions=60, language=language)
    assert digest(world.save(tmp_path)) == GOLDEN[profile, language, split]
