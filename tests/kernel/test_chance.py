from shoal.kernel import Chance


def test_the_same_seed_and_name_give_the_same_draws() -> None:
    assert Chance(7).stream("pick").random() == Chance(7).stream("pick").random()


def test_streams_of_different_names_are_independent_of_who_draws_first() -> None:
    one, two = Chance(7), Chance(7)
    one.stream("other").random()
    assert one.stream("pick").random() == two.stream("pick").random()
    assert Chance(7).stream("a").random() != Chance(7).stream("b").random()
