"""The same weights and token ids, decoded greedily by this package and by others.

    python -m benchmarks.other_implementations                       # the packaged pair
    python -m benchmarks.other_implementations --data dev.tsv.gz --num_inputs 60 \\
        --draft transformer mixed copy --gamma 3 --json benchmarks/implementations_pair.json
    python -m benchmarks.other_implementations --size t5_1_1_base --gamma 5 --weights auto int8 \\
        --draft random int8 int4 --alpha 0.75 0.994 0.913

Compared are transformers (eager, static cache, assisted generation with the same draft, prompt
lookup beside ``copy``), CTranslate2 (float32, and int8 as a note), OpenVINO (int8, through
optimum-intel) and T5X's ``temperature_sample``, each where it is installed, at float32 and batch 1,
on the CPU. ``--size`` takes published sizes with random weights instead of a pair: for time alone,
with draft tokens accepted at the rate ``--alpha``.

What keeps the comparison fair:

* Every row is a separate process in every round, with the same processors and threads. Rounds
  alternate, the rows take turns in going first, and ratios are medians over the rounds.
* Compilation and allocation are timed apart: a process decodes every input once before it times,
  then again and again for a second, of which the median counts.
* Token ids are compared with those of plain decoding with this package.
* The table ends with the memory-bandwidth bound: the time that one pass over the weights takes
  at the read bandwidth measured in the same rounds. Plain decoding cannot be faster.

Run it where nothing else runs.
"""
