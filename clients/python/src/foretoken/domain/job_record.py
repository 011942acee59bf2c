"""Jobs as the catalog keeps them for the processes of a service: leased, continued, read by all."""

from dataclasses import dataclass

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.job import Job
from foretoken.domain.name import check_name

# A message of the wire has room for several.
MAX_PIECE_BYTES = 2 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """A file of a job and its size."""

    name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A job of a service, and who works on it.

    `request_json` is what was requested, empty where the job cannot go on in another process and
    in lists. `version` is that of the program it was created by. A `worker` has the job until its
    lease is over, which `is_leased` says by the catalog's clock; `num_leases` tells one lease from
    the next. `num_interruptions` is how often a lease ended while the job ran. `is_unwanted`: the
    worker is to stop. `change_number` grows over all jobs with each change that readers see.
    """

    service: str
    job: Job
    request_json: str = ""
    version: str = ""
    worker: str = ""
    is_leased: bool = False
    num_leases: int = 0
    num_interruptions: int = 0
    is_unwanted: bool = False
    change_number: int = 0
    files: tuple[JobFile, ...] = ()

    def __post_init__(self) -> None:
        """Check the names."""
        check_name(self.service, "service")
        check_name(self.job.job_id, "job_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPiece:
    """Bytes of a file from the `first_byte` on; what the file has from there on is replaced."""

    name: str
    first_byte: int
    content: bytes

    def __post_init__(self) -> None:
        """Check the name and the size."""
        check_name(self.name, "name")
        if self.first_byte < 0:
            raise InvalidRequestError.of_field("first_byte", "must not be negative")
        if len(self.content) > MAX_PIECE_BYTES:
            raise InvalidRequestError.of_field("content", f"has at most {MAX_PIECE_BYTES} bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUpdate:
    """What the worker of a lease has to say of its job; it is stored whole or not at all.

    The lease is renewed for `lease_s`, or ends with 0 and with a final state. `dropped` are files
    that are of no use any more.
    """

    job: Job
    worker: str
    num_leases: int
    lease_s: float
    pieces: tuple[JobPiece, ...] = ()
    dropped: tuple[str, ...] = ()
