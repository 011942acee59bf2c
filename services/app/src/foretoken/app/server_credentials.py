"""What a server shows its callers, and checks them against: certificates that may be renewed."""

import logging

import grpc

from foretoken.app.config import ServerConfig
from foretoken.domain.errors import InvalidRequestError
from foretoken.wire.credential_files import CredentialFiles

_log = logging.getLogger(__name__)

_KEY, _CERTIFICATE, _CLIENT_CA = (
    f"server.{name}" for name in ("tls_key_file", "tls_certificate_file", "tls_client_ca_file")
)


def build_credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """Return the credentials of a server with TLS.

    New connections get what is in the files by then; those there are go on.

    Raises:
        InvalidRequestError: a file cannot be read.

    """
    files = CredentialFiles(
        {
            _KEY: config.tls_key_file,
            _CERTIFICATE: config.tls_certificate_file,
            _CLIENT_CA: config.tls_client_ca_file,
        }
    )

    def read() -> grpc.ServerCertificateConfiguration:
        found = files.read()
        return grpc.ssl_server_certificate_configuration(
            [(found[_KEY], found[_CERTIFICATE])], root_certificates=found.get(_CLIENT_CA)
        )

    def renew() -> grpc.ServerCertificateConfiguration | None:
        if not files.has_changed():
            return None
        try:
            renewed = read()
        except InvalidRequestError as err:
            _log.warning("certificates stay as they were: %s", err.message)
            return None
        _log.info("certificates read again")
        return renewed

    # The stubs know of no None, which stands for no change.
    return grpc.dynamic_ssl_server_credentials(
        read(),
        renew,  # type: ignore[arg-type]
        require_client_authentication=bool(config.tls_client_ca_file),
    )
