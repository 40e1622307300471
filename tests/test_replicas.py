"""What the optimizers' own tests do not reach of the layer that knows tf.distribute."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import harness
from vrgd_tf import replicas


@pytest.mark.parametrize(
    "cls", [tf.distribute.ParameterServerStrategy, tf.distribute.experimental.CentralStorageStrategy]
)
def test_asynchronous_strategies_are_refused_by_name(cls):
    with pytest.raises(ValueError, match=cls.__name__):
        replicas.check_strategy(object.__new__(cls))


def test_strategy_of_variables_comes_before_the_current_one():
    with harness.strategy_of(2).scope():
        variable = keras.Variable(0.0)
        strategy = tf.distribute.get_strategy()
    assert replicas.strategy_of([variable]) is strategy
    with strategy.scope():
        assert replicas.strategy_of([]) is strategy


@pytest.mark.parametrize("merge_call", [True, False])
@pytest.mark.parametrize("taken", [True, False])
def test_branches_of_cond_may_sum_and_write(taken, merge_call):
    strategy = harness.strategy_of(2, merge_call)
    with strategy.scope():
        flag = keras.Variable(taken, dtype="bool", aggregation="only_first_replica")
        target = keras.Variable(0.0, aggregation="only_first_replica")

    def total(sign):
        def branch(x):
            [result] = replicas.all_reduce_sum([x])
            replicas.assign([target], [sign * result])

        return branch

    @tf.function
    def step():
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            x = tf.cast(replica, tf.float32) + 1
            replicas.cond(lambda: tf.convert_to_tensor(flag), total(1), total(-1), [x])

        strategy.run(on_replica)

    step()
    assert [float(copy.numpy()) for copy in target.value.values] == [3.0 if taken else -3.0] * 2


def test_local_variable_differs_between_replicas_and_starts_at_zero():
    strategy = harness.strategy_of(2)
    with strategy.scope():
        variable = replicas.local_variable((), "float32", "local")

    @tf.function
    def step():
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            variable.assign(variable + tf.cast(replica, tf.float32) + 1)

        strategy.run(on_replica)

    step()
    step()
    np.testing.assert_array_equal([float(copy.numpy()) for copy in variable.value.values], [2, 4])


@pytest.mark.parametrize("merge_call, computed", [(True, 1), (False, 2)])
def test_what_is_the_same_on_all_replicas_is_computed_once_where_they_share_memory(merge_call, computed):
    strategy = harness.strategy_of(2, merge_call)
    calls = []

    def double(x, pairs):
        calls.append(tf.distribute.in_cross_replica_context())
        return [2 * x, {name: None if value is None else 2 * value for name, value in pairs.items()}]

    def on_replica():
        x, pairs = replicas.once(double, tf.constant(3.0), {"a": tf.constant(4.0), "b": None})
        assert pairs["b"] is None
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return x + pairs["a"] + tf.cast(replica, tf.float32)

    results = tf.function(lambda: strategy.run(on_replica))()
    assert [float(value) for value in strategy.experimental_local_results(results)] == [14, 15]
    assert calls == [merge_call] * computed


def test_one_replica_has_nothing_to_share():
    assert float(replicas.once(lambda x: 2 * x, tf.constant(3.0))) == 6
