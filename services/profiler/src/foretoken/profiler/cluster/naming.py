"""Names: of a profile that has none, of its Job, and of what it requests."""

import dataclasses
import hashlib
import json
import re

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.overlap import is_group_call
from foretoken.profiler.planning.profile_name import name_profile

# A pod's host name is the Job's name and its index, and may have 63 characters.
_LONGEST_SLUG = 36
_HASH_LENGTH = 8


def name_request(request: ProfileRequest) -> ProfileRequest:
    """Return the request with its device's own name, and a name of its own.

    Raises:
        UnknownDeviceError: no such device.

    """
    request = dataclasses.replace(request, device=find_device(request.device).name)
    return dataclasses.replace(request, name=name_profile(request))


def name_of_job(profile: str) -> str:
    """Return the name of a profile's Job, the same for the same profile."""
    slug = re.sub(r"[^a-z0-9]+", "-", profile.lower())[:_LONGEST_SLUG].strip("-")
    return "-".join(filter(None, ("foretoken", slug, _hash(profile)[:_HASH_LENGTH])))


def hash_content(request: ProfileRequest, num_shards: int) -> str:
    """Return a hash of what is profiled and how it is dealt."""
    return _hash([schema.encode(request), num_shards])


def is_collective(request: ProfileRequest) -> bool:
    """Return whether the request is for collectives, whose pods must be there together.

    Raises:
        UnknownOperatorError: it names an operator that does not exist.
        InvalidRequestError: it mixes them with others.

    """
    kinds = {find_operator(name).is_collective for name in request.operators}
    # What is timed concurrently with a collective runs in the same pods.
    kinds |= {is_group_call(c) for c in request.calls}
    if len(kinds) > 1:
        raise InvalidRequestError.of_field(
            "operators",
            "collectives run in pods that meet, other operators in pods of their own:"
            " profile them one after the other",
        )
    return kinds == {True}


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
