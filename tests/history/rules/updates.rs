//! No lost update: of those who read a number under a lock and write it back one larger, no two
//! write the same one.

use std::collections::BTreeMap;

use super::{Finding, Rule};
use crate::history::story::{Story, Write};

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
                rule: Rule::Updates,
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

    const WRITES: &str = "10 1@1 7 write 5 1 accepted\n20 1@1 7 write 5 2 accepted\n30 2@1 8 write 6 3 accepted\n40 1@1 7 write 5 3 refused";

    #[test]
    fn each_number_is_written_once_and_in_the_order_of_tokens() {
        assert_eq!(find(&story(WRITES)).len(), 0);
        assert_eq!(find(&story(&WRITES.replace("6 3", "6 2"))).len(), 1);
        assert_eq!(find(&story(&WRITES.replace("refused", "accepted"))).len(), 1);
        assert_eq!(find(&story(&WRITES.replace("6 3", "4 3"))).len(), 1);
        assert_eq!(find(&story(&WRITES.replace("2@1 8 write 6 3", "2@2 8 write 4 2"))).len(), 0);
    }
}
