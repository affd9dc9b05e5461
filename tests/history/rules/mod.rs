//! The rules, each in a file of its own with the histories that break it, and those that only seem
//! to.

pub(crate) mod agreement;
pub(crate) mod bounds;
pub(crate) mod exclusion;
pub(crate) mod fence;
pub(crate) mod losses;
pub(crate) mod order;
pub(crate) mod peace;
pub(crate) mod remains;
pub(crate) mod silence;
pub(crate) mod spans;
pub(crate) mod updates;

pub(crate) use exclusion::Overlap;

/// What a history may break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rule {
    Exclusion,
    Order,
    Agreement,
    Bounds,
    Peace,
    Losses,
    Fence,
    Updates,
    Remains,
}

/// Something that must not be.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) rule: Rule,
    /// Zero where it is about none.
    pub(crate) lock: u32,
    pub(crate) seats: Vec<u32>,
    pub(crate) from: u64,
    pub(crate) until: u64,
    /// What is wrong, as a sentence.
    pub(crate) text: String,
}

/// Nanoseconds for people.
pub(crate) fn span(nanos: u64) -> String {
    let millis = nanos as f64 / 1e6;
    if millis < 1000.0 { format!("{millis:.1} ms") } else { format!("{:.2} s", millis / 1000.0) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::{Record, Story};

    /// The story of records that are written as in the file. What comes before `|` applies to all.
    #[track_caller]
    pub(crate) fn story(text: &str) -> Story {
        let parse =
            |line: &str| line.parse::<Record>().unwrap_or_else(|error| panic!("{line:?}: {error}"));
        let records: Vec<Record> =
            text.lines().map(str::trim).filter(|line| !line.is_empty()).map(parse).collect();
        Story::of(&records)
    }
}
