//! No lost update: each holder reads a number and writes it back increased by one, so no value may
//! be written twice.

use std::collections::BTreeMap;

use super::{Finding, Rule};
use crate::history::model::{Story, Write};

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let mut locks: BTreeMap<u32, Vec<(u64, &Write)>> = BTreeMap::new();
    for write in story.writes.iter().filter(|write| write.accepted) {
        if let Some(value) = write.value {
            locks.entry(write.lock).or_default().push((value, write));
        }
    }
    let mut found = Vec::new();
    for writes in locks.values_mut() {
        writes.sort_by_key(|(value, write)| (*value, write.token));
        for pair in writes.windows(2) {
            let [(value, one), (next, other)] = pair else { continue };
            let text = if value == next {
                format!("tokens {} and {} both wrote the value {value}", one.token, other.token)
            } else if other.token < one.token {
                format!(
                    "token {} wrote {value} and token {} then wrote {next}",
                    one.token, other.token
                )
            } else {
                continue;
            };
            found.push(Finding {
                rule: Rule::LostUpdates,
                lock: one.lock,
                seats: vec![one.seat, other.seat],
                from: one.at.min(other.at),
                until: one.at.max(other.at),
                text,
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    const WRITES: &str = "\
        10 1@1 7 write 5 1 accepted\n\
        20 1@1 7 write 5 2 accepted\n\
        30 2@1 8 write 6 3 accepted\n\
        40 1@1 7 write 5 3 refused";

    #[test]
    fn value_written_twice_or_against_token_order_is_found() {
        assert_eq!(find(&story(WRITES)).len(), 0);
        assert_eq!(find(&story(&WRITES.replace("6 3", "6 2"))).len(), 1);
        assert_eq!(find(&story(&WRITES.replace("refused", "accepted"))).len(), 1);
        assert_eq!(find(&story(&WRITES.replace("6 3", "4 3"))).len(), 1);
        assert_eq!(find(&story(&WRITES.replace("2@1 8 write 6 3", "2@2 8 write 4 2"))).len(), 0);
    }
}
