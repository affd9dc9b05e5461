//! The rules, one in each file. Their tests have histories that break the rule, and some that only
//! seem to.

pub(crate) mod availability;
pub(crate) mod bounds;
pub(crate) mod exclusion;
pub(crate) mod fence;
pub(crate) mod intervals;
pub(crate) mod leaks;
pub(crate) mod liveness;
pub(crate) mod lost_updates;
pub(crate) mod order;
pub(crate) mod server_agreement;
pub(crate) mod unexplained_losses;

pub(crate) use exclusion::Overlap;

/// The rules that a history can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rule {
    Exclusion,
    Order,
    ServerAgreement,
    Bounds,
    Availability,
    UnexplainedLosses,
    Fence,
    LostUpdates,
    /// Leftovers, failures, unexplained errors, and records that show too little.
    Other,
}

/// A violation of a rule.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) rule: Rule,
    /// Zero if the violation is not about one lock.
    pub(crate) lock: u32,
    pub(crate) seats: Vec<u32>,
    pub(crate) from: u64,
    pub(crate) until: u64,
    /// Describes the violation in one sentence.
    pub(crate) text: String,
}

/// Formats nanoseconds for people.
pub(crate) fn span(nanos: u64) -> String {
    let millis = nanos as f64 / 1e6;
    if millis < 1000.0 { format!("{millis:.1} ms") } else { format!("{:.2} s", millis / 1000.0) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::{Record, Story};

    /// The model of a record, given in its text form.
    #[track_caller]
    pub(crate) fn story(text: &str) -> Story {
        let parse =
            |line: &str| line.parse::<Record>().unwrap_or_else(|error| panic!("{line:?}: {error}"));
        let records: Vec<Record> =
            text.lines().map(str::trim).filter(|line| !line.is_empty()).map(parse).collect();
        Story::of(&records)
    }
}
