"""The programs that decode, each loaded whole where an earlier process has made it."""

from spec_t5x.loops import refill
from spec_t5x.loops.autoregressive import autoregressive_decode
from spec_t5x.loops.speculative import speculative_decode
from spec_t5x.machine.programs import Kept

_OF_A_LOOP = ("eos_id", "max_decode_len", "num_decodes", "rescale_log_probs")

decode_plainly = Kept(autoregressive_decode, (*_OF_A_LOOP, "coupled"))
decode_speculatively = Kept(speculative_decode, (*_OF_A_LOOP, "gamma", "verifier"))
prepare_slots = Kept(refill.prepare, ("loop", "paced", "waits"))
# The slots are updated in place.
burst = Kept(refill.burst, ("loop",), donated=2)
