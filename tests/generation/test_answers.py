"""Answers are a sequence, and come one by one."""

import copy
import pickle

import pytest

from spec_t5x.errors import InputError
from spec_t5x.generation.answers import Answers
from tests.checkpoints.faults import message_of
from tests.generation.cases import GREEDY, TEXTS

pytestmark = pytest.mark.usefixtures("quick_compilation", "kept_programs")


def test_answers_have_an_index_and_come_one_by_one(generator, greedy_alone):
    def answers(texts=TEXTS):
        return generator.generate(texts, GREEDY)

    expected = [greedy_alone[text] for text in TEXTS]
    assert answers()[0] == expected[0] and answers()[-2:] == expected[-2:]
    assert list(answers()) == [*answers()] == expected
    kept = answers()
    assert repr(kept) == "Answers(not kept: index them, or iterate once)"
    assert kept[1] == expected[1] and list(kept) == list(kept) == expected
    assert repr(kept) == f"Answers({expected})"
    # As a notebook's user asks first.
    with pytest.raises(AttributeError, match=r"is a list of outputs: try answer\[0\]\.output$"):
        print(kept[0].output)
    assert [next(kept) for _ in TEXTS] == expected
    coming = answers(iter(TEXTS))
    assert next(coming) == expected[0] and list(coming) == expected[1:]
    assert list(answers([])) == []


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda coming: (next(coming), coming[0]), "answer 0 is indexed while iterating"),
        (lambda coming: (list(coming), list(coming)), "were iterated over before and are not kept"),
    ],
)
def test_answers_that_are_not_kept_are_named(generator, ask, message):
    assert message in message_of(ask, generator.generate(iter(TEXTS[:2]), GREEDY))


def test_an_answer_that_is_an_error_is_never_empty_in_silence(generator):
    (answer,) = generator.generate("", GREEDY)
    looks = (list, iter, lambda answer: answer[0], lambda answer: answer[:1])
    for look in (*looks, lambda answer: [output for (output,) in [answer]]):
        with pytest.raises(InputError, match="the text is empty"):
            look(answer)
    assert repr(answer).startswith("Answer(error=InputError('the text is empty")
    for again in (copy.copy(answer), pickle.loads(pickle.dumps(answer))):
        assert str(again.error) == str(answer.error)
    (good,) = generator.generate(TEXTS[0], GREEDY)
    assert pickle.loads(pickle.dumps(good)) == copy.copy(good) == good == list(good)


@pytest.mark.parametrize(
    ("error", "message"),
    [(InputError("no memory"), "no memory"), (KeyboardInterrupt(), "decoding was interrupted")],
    ids=["error", "interrupt"],
)
@pytest.mark.parametrize("ask", [lambda answers: answers[0], list], ids=["index", "iteration"])
def test_a_failure_is_raised_again(error, message, ask):
    """A notebook's cell that is run again would else see no answers, and no error."""

    def failing():
        raise error
        yield

    answers = Answers(failing())
    with pytest.raises(type(error)):
        ask(answers)
    for _ in range(2):
        assert message_of(ask, answers).startswith(message)
