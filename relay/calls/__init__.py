"""The call gateway: decides, makes and records every call of every transport."""
