"""Whatever stands in the file, loading ends in a config or in one `ConfigError`; unknown keys never pass."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from millpond.config.load import load_config
from millpond.config.schema import check, table_type
from millpond.config.sections import TABLE_BY_FIELD, Config, section_types
from millpond.core.errors import ConfigError

WHOLE = {
    **{name: {} for name in section_types()},
    "host": [{"name": "h0"}],
    "group": [{"name": "p0", "role": "prefill"}, {"name": "d0", "role": "decode"}],
    "link": [{"a": "h0", "net": "snic"}],
    "tenant": [{"name": "t", "key_hashes": []}],
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


FIELDS = {
    **{name: set(record.__dataclass_fields__) for name, record in section_types().items()},
    **{table: set(table_type(field).__dataclass_fields__) for field, table in TABLE_BY_FIELD.items()},
}


@given(st.sampled_from(sorted(WHOLE)), st.text(min_size=1, max_size=12), VALUES)
def test_an_unknown_key_at_any_level_is_refused_with_its_path(section: str, key: str, value: object):
    assume(key not in FIELDS[section])
    data = copy.deepcopy(WHOLE)
    content = data[section][0] if isinstance(data[section], list) else data[section]
    content[key] = value
    with pytest.raises(ConfigError, match="known:") as caught:
        check(data)
    assert caught.value.param in {f"{section}.{key}", f"{section}[0].{key}"}


@given(st.dictionaries(st.sampled_from([*WHOLE, "nowhere"]), VALUES, max_size=3))
def test_any_content_gives_a_config_or_a_config_error(data: dict[str, object]):
    with suppress(ConfigError):
        assert isinstance(check(data), Config)


@given(
    st.text(max_size=40) | st.builds("{}.{}={}".format, st.sampled_from(sorted(FIELDS)), st.text(), st.text())
)
def test_any_override_gives_a_config_or_a_config_error(override: str):
    with suppress(ConfigError):
        assert isinstance(load_config(None, [override]).config, Config)
