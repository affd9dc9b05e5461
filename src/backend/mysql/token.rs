//! How a database makes fencing tokens.

/// The SQL value of the next token of a row. It also becomes the number of the result, from which
/// the client reads it.
///
/// The server's time in microseconds keeps tokens rising where a transaction is rolled back, which
/// brings back the last token. `NOW()` would be the time before the wait for the row.
pub(super) const NEXT_TOKEN: &str =
    "LAST_INSERT_ID(GREATEST(token+1,CAST(UNIX_TIMESTAMP(SYSDATE(6))*1000000 AS UNSIGNED)))";
