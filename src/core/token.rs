//! `FencingToken`: lets a resource reject writes of former holders.

/// Orders the holders of one lock: the later holder has the larger token.
///
/// Send it with every write, and let the resource reject a token smaller than the largest it has
/// seen. That makes a write safe even if its writer was paused for longer than its lease; no lock
/// service can do it alone.
///
/// Tokens of one lock name increase with every grant, even if the server restarts without its data.
/// Tokens of different names are unrelated. A token is about as large as the server's clock in
/// microseconds, and always below 2⁵³, so it fits a `BIGINT` column and an `i64`.
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// let guard = distlock::RedisMgr::instance()?.lock("orders:42")?;
/// let token: i64 = guard.fencing_token().as_i64(); // for SQL
/// println!("UPDATE orders SET fence = {token} WHERE id = 42 AND fence <= {token}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(pub(crate) u64);

impl FencingToken {
    /// Returns the token as an unsigned number.
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Returns the token as a signed number, as most databases need it. Tokens are below 2⁵³, so
    /// the value never changes.
    pub const fn as_i64(self) -> i64 {
        self.0.cast_signed()
    }
}

impl std::fmt::Display for FencingToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> u64 {
        token.as_u64()
    }
}

impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> i64 {
        token.as_i64()
    }
}
