"""Settings to play with: widgets, or plain calls without them."""

import sys

import pytest

from spec_t5x.errors import InputError
from spec_t5x.experiments.explore import explore


def show(draft, gamma):
    print(f"{draft} at {gamma}")


def test_widgets_call_with_the_first_choices(capsys, monkeypatch):
    made = {}
    monkeypatch.setattr("ipywidgets.interact", lambda f, **menus: made.update(menus, f=f))
    explore(show, draft=["copy", "bigram"], gamma=[3, 5])
    assert made["f"] is show
    assert made["draft"].options == ("copy", "bigram") and made["draft"].value == "copy"
    assert made["gamma"].options == (3, 5)


def test_without_widgets_it_is_a_call_and_a_list_of_choices(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explore(show, draft=["copy", "bigram"], gamma=[3, 5])
    printed = capsys.readouterr().out
    assert "draft: 'copy', 'bigram'" in printed and "gamma: 3, 5" in printed
    assert printed.endswith("copy at 3\n")


def test_a_setting_without_choices():
    with pytest.raises(InputError, match="gamma has no choices: give at least one"):
        explore(show, draft=["copy"], gamma=[])
