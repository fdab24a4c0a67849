"""The paper's tasks by their real names, through seqio and TFDS.

    wmt_t2t_ende_v003   WMT14 English to German, BLEU
    cnn_dailymail_v002  CNN/DailyMail article to highlights, ROUGE

The tasks have the names, TFDS versions, prefixes, features and metrics of the ``t5`` library.
Importing this module registers the names that are still free: if the library was imported first,
its tasks are used. Importing the library after this module fails, because seqio refuses a name
twice. TFDS downloads a data set when it is first read.
"""

import dataclasses
import functools
import pkgutil

import gin

from spec_t5x.data.preprocessors import TO_IDS, prefixed
from spec_t5x.data.task_options import CNN_DAILYMAIL, SUMMARIZE_PREFIX, TRANSLATE_PREFIX, WMT_ENDE
from spec_t5x.machine.extras import HAS_LABS, needed

with needed("seqio"):
    import seqio

# T5X checks a task's vocabulary against the model's by this path, which its T5 models have.
VOCABULARY_PATH = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"

# Names that this module registered: a second call replaces these, never the library's tasks.
_ours: set[str] = set()


@gin.configurable(module="spec_t5x.data.paper_tasks")
def register_paper_tasks(vocabulary_path: str = VOCABULARY_PATH, extra_ids: int = 0) -> list[str]:
    """Registers the paper's tasks, or replaces those that an earlier call registered.

    Returns their names, without those that another library had registered before.

    Args:
        vocabulary_path: a SentencePiece model, local or in ``gs://``; it is read with the
            first task. The default file contains T5's 100 sentinels.
        extra_ids: number of sentinels to append: 100 for a ``spiece.model`` of Hugging Face.
    """
    feature = seqio.Feature(
        vocabulary=seqio.SentencePieceVocabulary(vocabulary_path, extra_ids), add_eos=True
    )
    # Not required, because the features of a language model are targets only.
    features = {"inputs": dataclasses.replace(feature, required=False), "targets": feature}
    wmt, cnn = "wmt_t2t_translate/de-en:1.0.0", "cnn_dailymail:3.4.0"
    registered = []
    for name, tfds_name, source, target, prefix, metric in (
        (WMT_ENDE, wmt, "en", "de", TRANSLATE_PREFIX, "bleu_intl_metric"),
        (CNN_DAILYMAIL, cnn, "article", "highlights", SUMMARIZE_PREFIX, "rouge_metric"),
    ):
        if name in _ours:
            seqio.TaskRegistry.remove(name)
        elif name in seqio.TaskRegistry.names():
            continue
        # Without ``labs`` a task can be decoded, and is not scored.
        found = [pkgutil.resolve_name(f"spec_t5x.labs.metrics:{metric}")] if HAS_LABS else []
        columns = {"source": source, "target": target, "prefix": prefix}
        seqio.TaskRegistry.add(
            name,
            source=seqio.TfdsDataSource(tfds_name=tfds_name),
            preprocessors=[functools.partial(prefixed, **columns), *TO_IDS],
            output_features=features,
            metric_fns=found,
        )
        _ours.add(name)
        registered.append(name)
    return registered


register_paper_tasks()
