"""The call gateway: every call of every transport is decided, made and recorded here."""
