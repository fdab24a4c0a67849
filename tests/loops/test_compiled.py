"""Models and drafts of different classes have different programs, which JAX mixes up."""

import flax.struct
import jax
import jax.numpy as jnp

from spec_t5x.interfaces import Draft, Proposal
from spec_t5x.loops import compiled


def defined_again(token):
    """Returns a draft of a new class, as a cell of a notebook makes that runs once more."""

    @flax.struct.dataclass
    class Mine(Draft):
        vocab_size: int = flax.struct.field(pytree_node=False)

        def propose(self, state, context, gamma):
            return Proposal(jnp.full((1, gamma), token)), state

    return Mine(4)


@flax.struct.dataclass
class Around:
    draft: Draft


def test_a_class_that_is_defined_again_has_a_program_of_its_own():
    """JAX takes one class for another by chance: here for some ten of 150 classes."""

    @compiled.jit(static_argnames="gamma")
    def propose(draft, state, *, gamma):
        return draft.draft.propose(state, None, gamma)[0].tokens

    for token in range(150):
        found = propose(Around(defined_again(token)), (), gamma=2)
        assert found.tolist() == [[token, token]]
    assert propose(draft=Around(defined_again(7)), state=(), gamma=1).tolist() == [[7]]
    last = Around(defined_again(8))
    assert propose.lower(last, (), gamma=1).compile()(last, ()).tolist() == [[8]]


def test_a_program_adds_true_and_false_to_counts_whatever_the_user_has_set():
    @compiled.jit(static_argnames="step")
    def count(draft, live, *, step):
        return jnp.full(2, step) + live

    with jax.numpy_dtype_promotion("strict"):
        assert count(None, jnp.array([True, False]), step=3).tolist() == [4, 3]


def test_classes_are_those_of_objects_and_of_their_fields():
    first, again = defined_again(1), defined_again(1)
    assert compiled.classes_of(None, Around(first)) == (Around, type(first))
    assert compiled.classes_of({"a": first}) == (type(first),)
    assert compiled.classes_of(Around((first, [again, 3]))) == (Around, type(again), type(first))
    assert compiled.classes_of(first) != compiled.classes_of(again)
