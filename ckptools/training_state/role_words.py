"""Words in the names of models that say what a model is for: an average of the weights, a teacher, a critic."""

from __future__ import annotations

import re

from ckptools.text import KeyPath

EMA, TRAINED, COPY = "ema", "trained", "online copy"

WORDS = {
    **dict.fromkeys(("ema", "emas", "averaged", "average", "averaging", "swa", "shadow", "polyak"), EMA),
    "teacher": "teacher",
    **dict.fromkeys(("ref", "reference"), "reference"),
    **dict.fromkeys(("critic", "critics"), "critic"),
    **dict.fromkeys(("disc", "discriminator", "discriminators"), "discriminator"),
    "target": "target",
    "best": "best",
    "frozen": "frozen",
}
"""Roles by words of a path: `model_ema`, `state_dict_ema`, `teacher`, `ref_policy`, `q_target`."""

PLAIN = frozenset(("ema", "emas", "averaged", "swa", "polyak", "teacher"))
"""Words of copies that nothing else is called."""

COPIES = PLAIN | {"average", "averaging", "shadow", "ref", "reference", "target", "best", "frozen"}
"""Words of models that begin as a copy of another model, and keep its names and shapes."""

LETTERS = frozenset(("d", "netD", "net_d", "net_D", "D"))
"""What the discriminator of a GAN is called beside a generator `g`."""

LOSSES = frozenset(("loss", "losses", "criterion", "criteria", "metric", "metrics"))
"""Words of modules beside a model: what measures it."""

APART = ("critic", "discriminator", "reward")
"""Roles of models that are no copies of the trained one, and may have an optimizer of their own."""

NETWORKS = frozenset(("model", "net", "network", "function", "fn", "head", "state"))
VALUED = {"value": "critic", "reward": "reward"}
"""Words that are a role only beside one of `NETWORKS`: `value_model`, `rewardNet`."""

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "network")
"""Keys under which trainers save the one model that they train."""

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def words_in(path: KeyPath) -> list[str]:
    """The words of a key path in lower case: `model_ema`, `modelEMA` and `model.ema` have the same."""
    return [word.lower() for key in path if isinstance(key, str) for word in WORD.findall(key)]
