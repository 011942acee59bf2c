"""Who may call what: every rpc takes a right, and roles are sets of rights."""

import enum
from collections.abc import Iterable, Mapping

from foretoken.domain.errors import InvalidRequestError


class Right(enum.Enum):
    """What a caller needs to be allowed one rpc."""

    READ = "read"
    # Rows and files of the catalog, and profiles, which end there.
    RECORD = "record"
    # Work that takes a machine's time: simulations, searches, trainings, checks.
    PLAN = "plan"
    CANCEL = "cancel"
    # What all answers rest on from then on.
    ACTIVATE = "activate"
    DELETE = "delete"
    SQL = "sql"
    BACKUP = "backup"
    # The jobs of services, which their processes share by way of the catalog.
    WORK = "work"
    ADMIN = "admin"


# Nobody has SQL or backups by the way: one reads whatever there is, the other all of it.
ROLES: Mapping[str, frozenset[Right]] = {
    "reader": frozenset({Right.READ}),
    "recorder": frozenset({Right.READ, Right.RECORD, Right.CANCEL}),
    "planner": frozenset({Right.READ, Right.PLAN, Right.CANCEL}),
    "admin": frozenset(Right),
}
_RIGHTS: Mapping[str, frozenset[Right]] = {
    right.value: frozenset({right}) for right in Right if right.value not in ROLES
}


def rights_of(names: Iterable[str]) -> frozenset[Right]:
    """Return the rights of roles and of rights by their names.

    Raises:
        InvalidRequestError: a name is neither.

    """
    known = {**_RIGHTS, **ROLES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidRequestError(
            f"no role or right: {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    return frozenset().union(*(known[name] for name in names))
