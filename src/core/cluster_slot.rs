//! The slots of a Redis Cluster: which slot a key belongs to, and a short text for each slot. Pure.

use std::sync::LazyLock;

/// Number of slots of every cluster.
pub(crate) const SLOTS: u16 = 16_384;

/// Returns the text between the first `{` and the next `}`, unless it is empty. Redis Cluster
/// hashes only this part of a key that has it.
pub(crate) fn hash_tag(key: &str) -> Option<&str> {
    let (tag, _) = key.split_once('{')?.1.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// Returns the slot of a key.
pub(crate) fn slot_of(key: &str) -> u16 {
    crc16(hash_tag(key).unwrap_or(key).as_bytes()) % SLOTS
}

/// Returns the tag of a slot: the smallest number whose decimal digits hash to the slot. All
/// clients must agree on it.
pub(crate) fn tag_of_slot(slot: u16) -> &'static str {
    static TAGS: LazyLock<Vec<Box<str>>> = LazyLock::new(all_tags);
    TAGS.get(usize::from(slot)).map_or("", |tag| tag)
}

fn all_tags() -> Vec<Box<str>> {
    let mut tags = vec![Box::<str>::default(); usize::from(SLOTS)];
    let mut missing = tags.len();
    for number in 0_u32.. {
        if missing == 0 {
            break;
        }
        let digits = number.to_string();
        if let Some(tag) = tags.get_mut(usize::from(slot_of(&digits)))
            && tag.is_empty()
        {
            *tag = digits.into();
            missing -= 1;
        }
    }
    tags
}

/// CRC-16/XMODEM, as the specification of Redis Cluster prescribes it.
fn crc16(bytes: &[u8]) -> u16 {
    const TABLE: [u16; 256] = table();
    bytes.iter().fold(0, |crc: u16, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ *byte)])
}

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = (index as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot_of("foo"), 12_182);
        assert_eq!(slot_of("{user1000}.following"), slot_of("{user1000}.followers"));
        for (key, tag) in [
            ("foo{}{bar}", None),
            ("foo{{bar}}zap", Some("{bar")),
            ("foo{bar}{zap}", Some("bar")),
            ("foo{bar", None),
            ("foo}bar{", None),
        ] {
            assert_eq!(hash_tag(key), tag, "{key}");
        }
    }

    #[test]
    fn every_slot_has_a_tag_that_hashes_to_it() {
        for slot in 0..SLOTS {
            assert_eq!(slot_of(tag_of_slot(slot)), slot);
        }
        let longest = (0..SLOTS).map(|slot| tag_of_slot(slot).len()).max();
        assert!(longest <= Some(6), "{longest:?}");
        assert_eq!(tag_of_slot(slot_of("0")), "0");
    }
}
