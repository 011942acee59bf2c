"""The rows of an answer in pieces that a reader can hold, up to the limits."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from foretoken.catalog.sql.frame import limit_error

# What the reader has in memory of an answer at a time; less than a message of gRPC holds, so that
# rows before an error arrive.
_PIECE_BYTES = 2**20
# Of one row: pieces are not cut within a row.
_MAX_ROW_BYTES = 16 * 2**20


def cut_rows(
    batches: Iterable[pa.RecordBatch], num_wanted: int, max_rows: int, max_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows up to those wanted (0: all), in pieces of about a MiB.

    Raises:
        QueryLimitError: more are wanted and there than may be sent, or one is too large.

    """
    num_rows = num_bytes = 0
    for batch in batches:
        rows = batch.slice(0, num_wanted - num_rows) if num_wanted else batch
        num_left = max_rows - num_rows
        num_rows += rows.num_rows
        for piece in _split(rows.slice(0, num_left)):
            num_bytes += piece.nbytes
            if num_bytes > max_bytes:
                raise limit_error("size", f"has a result of more than {max_bytes >> 20} MiB")
            yield piece
        if num_rows > max_rows:
            raise limit_error("rows", f"has a result of more than {max_rows} rows")
        if num_rows == num_wanted and num_wanted:
            return


def _split(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    pending = [rows]
    while pending:
        piece = pending.pop()
        if piece.nbytes <= _PIECE_BYTES or (piece.num_rows == 1 and piece.nbytes <= _MAX_ROW_BYTES):
            yield piece
        elif piece.num_rows == 1:
            raise limit_error("size", f"has a row of more than {_MAX_ROW_BYTES >> 20} MiB")
        else:
            half = piece.num_rows // 2
            pending += [piece.slice(half), piece.slice(0, half)]
