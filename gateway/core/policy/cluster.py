"""Policy of a cluster: gateways on several machines, of which one decides for all."""

from __future__ import annotations

import msgspec

from gateway.core.policy.types import FileName, HostName, HostPort, Name, PasswordFile, StoreUrl, TokenFile


class ClusterTls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS between members. All members have it, or none.

    `cert_file`: File with this member's certificate chain, in PEM. Its path is relative to this file.
    `key_file`: File with its private key; null: it is in the chain's file.
    `ca_file`: File with the certificates of who signs the members', in PEM; null: the system's authorities.
    `name`: Name that the members' certificates are for, where all have one; null: the host each advertises.
    """

    cert_file: FileName
    key_file: FileName | None = None
    ca_file: FileName | None = None
    name: HostName | None = None


class ClusterPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Gateways on several machines. It takes effect at a start, with --workers 2 or more.

    `url`: Store of the members and the leader's lease: Valkey 7.2 or later, or Redis 7 or later; with the user, unless
    the default one. No call waits for the store. valkeys:// needs a certificate of the system's authorities, or of
    SSL_CERT_FILE's.
    `password_file`: File with the password at the store, alone in it. Its path is relative to this file.
    `name`: Name of the cluster in the store. Clusters of one store have different names.
    `advertise`: Address by which other members reach this one. `gateway serve --advertise` sets it on a command line.
    `listen`: Address to listen at for other members; null: the one that is advertised.
    `token_file`: File with the token that members show each other, or with two. It never crosses the network.
    `tls`: TLS between members; null: what calls ask for, and engines' keys, cross the network in the clear.
    """

    url: StoreUrl
    password_file: PasswordFile | None = None
    name: Name = "weir"
    advertise: HostPort | None = None
    listen: HostPort | None = None
    token_file: TokenFile
    tls: ClusterTls | None = None
