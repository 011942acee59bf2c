"""What can be said about a lake before anything is started."""

from typing import Any

import duckdb
import pytest

from foretoken.catalog.config import CatalogConfig, LakeConfig
from foretoken.catalog.storage.lake import LakeAttachment, load_extension
from foretoken.domain import schema
from foretoken.domain.errors import CatalogBusyError, CorruptCatalogError, InvalidRequestError


@pytest.mark.parametrize(
    "changes",
    [
        {"data_path": ""},
        {"postgres": "host=db password=unspoken"},
        {"postgres": "postgresql://somebody:unspoken@db/foretoken"},
        {"schema_name": 'a"; DROP'},
    ],
    ids=["no place", "password", "password in a URI", "no name"],
)
def test_what_no_lake_could_be_opened_with_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        LakeConfig(**{"data_path": "s3://bucket", **changes})
    assert "unspoken" not in str(raised.value)
    assert [next(iter(changes))] == [violation.field for violation in raised.value.violations]


def test_a_section_of_the_configuration_is_a_lake() -> None:
    section = {"path": "unused", "lake": {"data_path": "s3://bucket", "s3_region": "eu-west-1"}}
    config = schema.decode(CatalogConfig, section)
    assert LakeConfig(data_path="s3://bucket", s3_region="eu-west-1") == config.lake


def test_a_missing_extension_says_what_to_install() -> None:
    with duckdb.connect() as connection, pytest.raises(InvalidRequestError) as raised:
        load_extension(connection, "never_was")
    assert "pip install 'foretoken[lake]'" in raised.value.message


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Exceeded the maximum retry count of 0", CatalogBusyError),
        ('Unable to connect to Postgres at "host=db": Connection refused', CatalogBusyError),
        ('connection to server failed: FATAL:  role "nobody" does not exist', InvalidRequestError),
        ("HTTP Error: Unable to connect (HTTP code 404) NoSuchBucket", InvalidRequestError),
        ("HTTP Error: s3://bucket/rows.parquet (HTTP code 404)", CorruptCatalogError),
        ("HTTP Error: Could not establish connection", CatalogBusyError),
    ],
)
def test_errors_say_what_to_do(text: str, error: type[Exception]) -> None:
    attachment = LakeAttachment(LakeConfig(data_path="s3://bucket"))
    assert error is type(attachment.explain(duckdb.Error(text)))
    # A failed commit quotes the rows it was to write; they say nothing.
    long = f"Failed to commit {'FATAL:  role ' * 1000} {text}"
    assert len(str(attachment.explain(duckdb.Error(long)))) < 1000


def test_an_error_that_is_not_about_the_lake_is_left_to_others() -> None:
    attachment = LakeAttachment(LakeConfig(data_path="s3://bucket"))
    assert attachment.explain(duckdb.Error("Parser Error: syntax error")) is None
