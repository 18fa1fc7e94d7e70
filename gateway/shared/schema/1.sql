-- Tokens that tenants have used by calendar window: gateway/serve/token_use.py.
CREATE TABLE token_use (
    tenant TEXT NOT NULL,
    span TEXT NOT NULL,
    start INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (tenant, span, start)
) STRICT, WITHOUT ROWID;
