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
    static TAGS: LazyLock<Tags> = LazyLock::new(Tags::find);
    TAGS.get(slot)
}

/// The tags of all slots, one after the other.
struct Tags {
    text: String,
    ends: Vec<u32>,
}

impl Tags {
    fn find() -> Tags {
        let mut smallest = vec![None::<u32>; usize::from(SLOTS)];
        let mut missing = smallest.len();
        for number in 0.. {
            if missing == 0 {
                break;
            }
            let mut digits = itoa::Buffer::new();
            let slot = crc16(digits.format(number).as_bytes()) % SLOTS;
            if let Some(tag @ None) = smallest.get_mut(usize::from(slot)) {
                *tag = Some(number);
                missing -= 1;
            }
        }
        let mut tags = Tags { text: String::new(), ends: Vec::new() };
        for number in smallest.into_iter().flatten() {
            tags.text.push_str(itoa::Buffer::new().format(number));
            tags.ends.push(u32::try_from(tags.text.len()).unwrap_or(u32::MAX));
        }
        tags
    }

    fn get(&self, slot: u16) -> &str {
        let end = |at: usize| self.ends.get(at).map_or(0, |end| *end as usize);
        let slot = usize::from(slot);
        self.text.get(slot.checked_sub(1).map_or(0, end)..end(slot)).unwrap_or_default()
    }
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
