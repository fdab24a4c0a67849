"""Compares greedy decoding by this package and by other libraries, with the same weights.

    python -m benchmarks.other_implementations                       # the packaged pair
    python -m benchmarks.other_implementations --data dev.tsv.gz --num_inputs 60 \\
        --draft transformer mixed copy --gamma 3 --json benchmarks/implementations_pair.json
    python -m benchmarks.other_implementations --size t5_1_1_base --gamma 5 --weights auto int8 \\
        --draft random int8 int4 --alpha 0.75 0.994 0.913

The others are transformers (eager, static cache, assisted generation with the same draft, prompt
lookup if ``copy`` is measured), CTranslate2 (float32, int8), OpenVINO (int8, through optimum-intel)
and T5X's ``temperature_sample``. All run at batch 1 on the CPU, in float32 except for rounded
weights, which a footnote marks. With ``--size``, models of published sizes have random weights:
only times are measured, and the tokens of each draft are accepted at its rate of ``--alpha``.

Measures for a fair comparison:

* Every row of the table runs in a new process in every round, with the same processors and
  threads. Each round begins with another row, and ratios are medians over the rounds.
* Compilation and allocation are timed separately: a process decodes all inputs once as a warm-up,
  then repeatedly for a second, of which it reports the median time.
* Token ids are compared with those of plain decoding with this package.
* The table ends with the memory-bandwidth bound: the time that one pass over the weights takes
  at the read bandwidth measured in the same rounds. Plain decoding cannot be faster.

Run it on an otherwise idle machine.
"""
