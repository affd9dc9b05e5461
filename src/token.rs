//! `FencingToken`: lets a resource reject writes of former holders.

/// Proof of order at the resource: of two holders of one lock, the later one has the larger token.
///
/// Send it along with every write, and let the resource refuse a token smaller than the largest it
/// has seen. That is what makes a write safe even if its writer was paused for longer than its
/// lease; no lock service can do it alone. Tokens stay below 2⁵³ and go on rising over restarts of
/// the server without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(pub u64);

impl std::fmt::Display for FencingToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> u64 {
        token.0
    }
}
