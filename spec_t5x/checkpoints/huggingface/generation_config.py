"""Decoding settings of a Hugging Face directory: the defaults of transformers' ``generate``.

They are in ``generation_config.json`` or, if that is absent, in ``config.json``. A model keeps
them unchanged under ``metadata["generation"]``, so that a converted model has them, too.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_t5x.checkpoints.storage.files import CONFIG_NAME, describing, read_json
from spec_t5x.errors import InputError, is_number, shown
from spec_t5x.options import MOST_BIAS, GenerateOptions

GENERATION_NAME = "generation_config.json"
# The entry of a model's metadata with all settings; config.json's entry with settings by task.
GENERATION = "generation"
TASKS = "task_specific_params"

# Settings that become decoding options of the same name: numbers, and token ids.
_NUMBERS = {"repetition_penalty": float, "no_repeat_ngram_size": int}
_IDS = (
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("bad_words_ids", "sequence_bias"),
)
# Our options of length, and transformers' names of lengths without and with the start token.
_LENGTHS = {
    "max_decode_len": ("max_new_tokens", "max_length"),
    "min_decode_len": ("min_new_tokens", "min_length"),
}
_BEAMS = {"length_penalty", "early_stopping"}
# Settings that change transformers' output but have no effect here, with their neutral values:
# of sampling, which matter only where it samples, and others.
_SAMPLING = {
    **{"top_p": 1.0, "top_k": 0, "typical_p": 1.0, "min_p": 0.0},
    **{"top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0},
}
_LEFT_OUT = {
    **{"num_beams": 1, "do_sample": False, "num_return_sequences": 1, "guidance_scale": 1},
    **{"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "penalty_alpha": 0},
    **{"diversity_penalty": 0, "num_beam_groups": 1, "renormalize_logits": False},
    **dict.fromkeys(("stop_strings", "exponential_decay_length_penalty", "watermarking_config")),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids", "forced_decoder_ids")),
    **dict.fromkeys(("token_healing", "is_assistant", "force_bos_token_to_be_generated"), False),
    # The prefix is a text before each input, which is set by task only.
    **{"max_time": None, "prefix": None},
}
# Options that have the effect of a setting; and those that, once given, replace a setting.
_REMEDIES = {
    **{"num_beams": "beams", "num_return_sequences": "num_decodes", "stop_strings": "stop"},
    **{"do_sample": "temperature", "top_p": "top_p", "top_k": "top_k"},
}
_REPLACED_BY = _REMEDIES | {of_all: ours for ours, (_, of_all) in _LENGTHS.items()}
_KNOWN = {*_NUMBERS, *_IDS, *_BEAMS, *_SAMPLING, *_LEFT_OUT, "temperature"} - {"prefix"}
_KNOWN.update(*_LENGTHS.values())
# Parts of config.json that may hold settings, too; only the first that exists is read.
_NESTED = ("decoder", "generator", "text_config")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Settings of the checkpoint ``where`` that have no effect here."""

    where: str
    # By name, each setting's name and value.
    texts: dict[str, str]
    # All settings of the checkpoint.
    settings: Mapping[str, Any]

    def warn(self, inputs: Sequence[str], options: GenerateOptions) -> None:
        """Names settings that change the outputs with these inputs and options, each once."""
        usual = GenerateOptions  # A class, whose attributes are the fields' defaults.
        given = [n for n, o in _REPLACED_BY.items() if getattr(options, o) != getattr(usual, o)]
        prefix = str(self.settings.get("prefix", ""))
        if all(text.startswith(prefix) for text in filter(None, inputs)):
            given.append("prefix")
        # It moves all scores of a step alike, and so changes the ranking of beams only.
        if not options.beams:
            given.append("renormalize_logits")
        if not (options.temperature or self.settings.get("do_sample")):
            given += _SAMPLING
        named = []
        for name in [name for name in list(self.texts) if name not in given]:
            # Another thread may take one first.
            if text := self.texts.pop(name, None):
                options, remedy = self._with_remedy(options, name)
                named.append(text + remedy)
        if named:
            log.warning("%s sets options that are not applied: %s", self.where, ", ".join(named))

    def _with_remedy(self, options: GenerateOptions, name: str) -> tuple[GenerateOptions, str]:
        """Returns ``options`` with a setting's effect, and the flag; unchanged if it is refused."""
        value = self.settings.get("temperature" if name == "do_sample" else name)
        option = _REMEDIES.get(name)
        if option and value != getattr(GenerateOptions, option):
            with contextlib.suppress(InputError, OverflowError):
                changed = dataclasses.replace(options, **{option: value})
                return changed, f" (--{option} {'TEXT' if option == 'stop' else value})"
        return options, ""


def read(directory: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a directory with config.json ``values``; ``TASKS`` has the tasks'."""
    path, found = generation_entries(directory, values)
    if path.name != GENERATION_NAME:
        found = {name: value for name, value in found.items() if name in _KNOWN}
    tasks = values.get(TASKS)
    return found | {TASKS: tasks} if isinstance(tasks, Mapping) and tasks else found


def generation_entries(directory: Path, values: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Returns the file that transformers reads settings from, and its entries that are not null.

    The file is generation_config.json or, if that is absent, config.json.
    """
    path = directory / GENERATION_NAME
    return (path, present(read_json(path))) if path.is_file() else config_entries(directory, values)


def config_entries(directory: Path, values: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Returns config.json's path and entries that are not null; they override a decoder part's."""
    nested = next((part for part in map(values.get, _NESTED) if isinstance(part, Mapping)), {})
    return directory / CONFIG_NAME, present({**nested, **present(values)})


def options_of(
    settings: Mapping[str, Any],
    where: str,
    *,
    task: str | None = None,
    to_ours: Callable[[Sequence[int]], list[int]] = list,
    num_ids: int,
    is_decoder_only: bool = False,
) -> tuple[dict[str, Any], LeftOut]:
    """Returns our options by name, and the settings that have no effect here.

    Raises ``InputError`` for bad values or an unknown task.

    Args:
      settings: the result of ``read``; settings of ``task`` override the others.
      where: the checkpoint, with which messages begin.
      task: a name in ``task_specific_params``, or None.
      to_ours: maps ids of the checkpoint's tokenizer to those of the package's vocabulary.
      num_ids: number of the tokenizer's ids for which the model has logits.
      is_decoder_only: whether max_length and min_length count the prompt, and so are left out.
    """
    tasks = settings.get(TASKS, {})
    if task is not None and not (isinstance(tasks, Mapping) and task in tasks):
        raise InputError(
            f"{where} has no settings of a task {task!r}: it has "
            f"{', '.join(tasks) or 'no tasks'}; leave --task out, or name one"
        )
    with describing(where, TASKS):
        settings = {**settings, **present(tasks.get(task, {}))}
    if settings.get("do_sample"):
        # transformers' defaults where it samples.
        settings = {"temperature": 1.0, "top_k": 50} | settings
    left_out = dict(_left_out(settings))
    options = {n: _number(settings, n, _NUMBERS[n], where) for n in _NUMBERS if n in settings}
    options |= _ids(settings, where, to_ours, num_ids)
    for ours, (of_new, of_all) in _LENGTHS.items():
        if is_decoder_only and settings.get(of_all):
            left_out[of_all] = f"{of_all} {settings[of_all]} (it counts the prompt: --{ours})"
        if of_new in settings:
            options[ours] = _number(settings, of_new, int, where)
        elif of_all in settings and not is_decoder_only:
            options[ours] = max(_number(settings, of_all, int, where) - 1, 0)
    if options.get("max_decode_len") == 0:
        raise InputError(f"{where} allows no output: raise its max_length or max_new_tokens")
    if settings.keys() & _BEAMS or settings.get("num_beams", 1) != 1:
        options["length_penalty"] = _number(settings, "length_penalty", float, where, 1.0)
        options["early_stopping"] = ends = settings.get("early_stopping", False)
        if ends not in (True, False, "never"):
            raise InputError(f"{where} has early_stopping {ends!r}: give true, false or 'never'")
    if tasks and task is None:
        left_out[TASKS] = f"settings of the tasks {', '.join(tasks)} (--task NAME)"
    return options, LeftOut(shown(where), left_out, settings)


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are not None; transformers writes null for settings not set."""
    return {name: value for name, value in values.items() if value is not None}


def _number(settings, name: str, kind: type, where: str, otherwise=None):
    value = settings.get(name, otherwise)
    if not (is_number(value) and abs(value) < 2**31 and (kind is not int or value % 1 == 0)):
        raise InputError(f"{where} has {name} {value!r}: set a number of type {kind.__name__}")
    return kind(value)


def _ids(settings: Mapping[str, Any], where: str, to_ours, num_ids: int) -> dict[str, Any]:
    """Returns the settings of ``_IDS`` in our ids, as tuples; ``forced_bos_token_id`` is one id."""

    def ours(ids: list[int]) -> tuple[int, ...]:
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise TypeError(ids)
        return tuple(to_ours(ids))

    found = {}
    for name in _IDS:
        value = settings.get(name, [])
        if name.endswith("suppress_tokens") and isinstance(value, list):
            # transformers ignores ids that the model does not have.
            value = [each for each in value if type(each) is not int or 0 <= each < num_ids]
        if value == []:
            continue
        try:
            if name == "bad_words_ids":
                found[name] = tuple(map(ours, value))
            elif name == "sequence_bias":
                if not all(is_number(bias) and abs(bias) <= MOST_BIAS for _, bias in value):
                    raise ValueError(value)
                found[name] = tuple((ours(text), float(bias)) for text, bias in value)
            elif name == "forced_bos_token_id":
                (found[name],) = ours([value])
            else:
                found[name] = ours(sorted(value) if isinstance(value, list) else [value])
        except (TypeError, ValueError, OverflowError) as error:
            wanted = "pairs of ids and a number" if name == "sequence_bias" else "token ids"
            raise InputError(f"{where} has {name} {value!r}: set it to {wanted}") from error
        if name == "forced_eos_token_id" and list(found[name]) != sorted(found[name]):
            raise InputError(f"{where} has {name} {value}, whose order changes here: give one id")
    return found


def _left_out(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields each setting without effect here, and a text: its name and value."""
    for name, neutral in (_LEFT_OUT | _SAMPLING).items():
        value = settings.get(name, neutral)
        if value != neutral and value not in ([], ""):
            where = " (put it before each input)" if name == "prefix" else ""
            yield name, f"{name} {value!r}{where}"
