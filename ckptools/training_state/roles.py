"""Recognise the role of a model beside others: an average of the weights, a teacher, a reference, a critic.

A role is proven by a word in the section's path, by what a trainer's layout says, or by what a class of torch saves. It
says that a model is not the trained one. The trained one itself is chosen in `models.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptools.training_state.role_words import COPY, EMA, MODEL_KEYS, NETWORKS, TRAINED, VALUED, WORDS, words_in
from ckptools.training_state.sections import Section


def role_of(section: Section, sections: Sequence[Section]) -> str:
    """The role of a model among the sections of its checkpoint; "" where none is proven."""
    layout = _in_lightning(section, sections)
    if layout:
        return layout
    words = words_in(section.path if section.inside is None else section.path[-1:])
    role = next((WORDS[word] for word in words if word in WORDS), "")
    if not role and words[:1] == ["callbacks"]:
        role = "callback"  # of Lightning, which saves their states beside the model's
    if not role and NETWORKS.intersection(words):
        role = next((VALUED[word] for word in words if word in VALUED), "")
    if not role and _letters(section) == ["d"] and any(_letters(s) == ["g"] for s in sections if s.kind == "model"):
        role = "discriminator"
    if not role and section.inside is not None and any(word in WORDS for word in words_in(section.inside)):
        elsewhere = any(s.kind == "model" and s.inside != section.inside for s in sections)
        role = COPY if elsewhere else ""  # ema_pytorch's `online_model`
    return role or (EMA if is_averaged_model(section.value) else "")


def _in_lightning(section: Section, sections: Sequence[Section]) -> str:
    """The role that Lightning's `WeightAveraging` gives: it saves the average as `state_dict`, to be loaded elsewhere.

    Source: lightning/pytorch/callbacks/weight_averaging.py, `on_save_checkpoint`.
    """
    if {("current_model_state",), ("state_dict",)} <= {s.path for s in sections if s.kind == "model"} and any(
        s.path[:1] == ("averaging_state",) for s in sections
    ):
        return {("current_model_state",): TRAINED, ("state_dict",): EMA}.get(section.path, "")
    return ""


def _letters(section: Section) -> list[str]:
    """The words of a model's own name without those for any network: GANs are called `g` and `d`, `netG` and `netD`."""
    return [word for word in words_in(section.path[-1:]) if word not in NETWORKS]


def is_averaged_model(value: Mapping[str, object]) -> bool:
    """Whether a state dict is of torch's `AveragedModel`: a module in `module`, and the buffer `n_averaged`.

    Source: torch/optim/swa_utils.py, `AveragedModel.__init__`.
    """
    return "n_averaged" in value and all(name == "n_averaged" or name.startswith("module.") for name in value)


def called_model(sections: Sequence[Section]) -> list[Section]:
    """The models among some that have one of `MODEL_KEYS`; all that are called a model or network, if more are."""
    named = [s for s in sections if {"model", "net", "network", "module", "state"}.intersection(words_in(s.path[-1:]))]
    exact = [s for s in named if s.path[-1] in MODEL_KEYS]
    return exact if len(named) == 1 else named


def candidates(sections: Sequence[Section]) -> list[Section]:
    """The models that may be the trained one: the one that the layout names, those without a role, or else all."""
    models = [s for s in sections if s.kind == "model"]
    roles = [role_of(s, sections) for s in models] if len(models) > 1 else []
    for wanted in (TRAINED, ""):
        if wanted in roles:
            return [s for s, role in zip(models, roles, strict=True) if role == wanted]
    return models
