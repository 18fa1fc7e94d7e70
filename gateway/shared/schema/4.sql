-- Money that calls to providers cost, in micro-units: gateway/serve/token_use.py.
CREATE TABLE money_use (
    provider TEXT NOT NULL,
    tenant TEXT NOT NULL,
    model TEXT NOT NULL,
    span TEXT NOT NULL,
    start INTEGER NOT NULL,
    micro INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (provider, tenant, model, span, start)
) STRICT, WITHOUT ROWID;
