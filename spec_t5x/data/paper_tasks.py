"""The paper's tasks by their real names, through seqio and TFDS.

    wmt_t2t_ende_v003   WMT14 English to German, BLEU
    cnn_dailymail_v002  CNN/DailyMail article to highlights, ROUGE

They have the names, TFDS versions, prefixes, features and metrics of the ``t5`` library. Importing
this module registers those names that are still free, so that the library's own tasks are used if
they were imported first; importing the library after this module fails (seqio refuses a name
twice). TFDS downloads a data set when it is first read, not before. The same tasks over local
files: ``tasks.register_tsv_task`` and ``register_jsonl_task`` with the prefixes below.
"""

import dataclasses
import functools

import gin

from spec_t5x.data.metrics import bleu_intl_metric, rouge_metric
from spec_t5x.data.tasks import TO_IDS, prefixed
from spec_t5x.machine.extras import needed

with needed("seqio"):
    import seqio

# T5X compares a task's vocabulary with the model's by this name, and its T5 models have it.
VOCABULARY_PATH = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"

TRANSLATE_PREFIX = "translate English to German: "
SUMMARIZE_PREFIX = "summarize: "

WMT_ENDE = "wmt_t2t_ende_v003"
CNN_DAILYMAIL = "cnn_dailymail_v002"

# Names that this module registered: only they may be replaced.
_ours: set[str] = set()


@gin.configurable(module="spec_t5x.data.paper_tasks")
def register_paper_tasks(vocabulary_path: str = VOCABULARY_PATH, extra_ids: int = 0) -> list[str]:
    """Registers the paper's tasks, also again with another vocabulary.

    Args:
        vocabulary_path: a SentencePiece model, here or in ``gs://``; not read until a
            task is. The default holds T5's 100 sentinels.
        extra_ids: sentinels to add to it: 100 for a ``spiece.model`` of Hugging Face.

    Returns:
        The names that were registered: not those that another library had taken.
    """
    feature = seqio.Feature(
        vocabulary=seqio.SentencePieceVocabulary(vocabulary_path, extra_ids), add_eos=True
    )
    # A language model has targets only.
    features = {"inputs": dataclasses.replace(feature, required=False), "targets": feature}
    wmt, cnn = "wmt_t2t_translate/de-en:1.0.0", "cnn_dailymail:3.4.0"
    registered = []
    for name, tfds_name, source, target, prefix, metric in (
        (WMT_ENDE, wmt, "en", "de", TRANSLATE_PREFIX, bleu_intl_metric),
        (CNN_DAILYMAIL, cnn, "article", "highlights", SUMMARIZE_PREFIX, rouge_metric),
    ):
        if name in _ours:
            seqio.TaskRegistry.remove(name)
        elif name in seqio.TaskRegistry.names():
            continue
        columns = {"source": source, "target": target, "prefix": prefix}
        seqio.TaskRegistry.add(
            name,
            source=seqio.TfdsDataSource(tfds_name=tfds_name),
            preprocessors=[functools.partial(prefixed, **columns), *TO_IDS],
            output_features=features,
            metric_fns=[metric],
        )
        _ours.add(name)
        registered.append(name)
    return registered


register_paper_tasks()
