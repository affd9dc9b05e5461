//! Queue entries, as `parse` in `group/grant.lua` reads them.

use super::call::{self, is_digits, number};
use crate::core::kind::is_group;

/// A valid queue entry of a group, or of a lock held alone.
pub(super) struct Entry<'a> {
    pub(super) px: u64,
    pub(super) channel: &'a [u8],
    pub(super) id: &'a [u8],
    pub(super) group: Option<&'a [u8]>,
    pub(super) limit: usize,
    pub(super) count: usize,
}

impl<'a> Entry<'a> {
    /// `None` if the entry is not valid.
    pub(super) fn parse(entry: &'a [u8]) -> Option<Entry<'a>> {
        let (first, rest) = split(entry, b' ')?;
        let (channel, id) = split(rest, b' ')?;
        let (group, limit, count, px): (_, &[u8], &[u8], _) = match split(first, b',') {
            None => (None, b"0", b"1", first),
            Some((membership, px)) => {
                let (group, numbers) = split(membership, b'/')?;
                let (limit, count) = split(numbers, b'/')?;
                (Some(group), limit, count, px)
            }
        };
        let is_valid = is_positive(px)
            && px.len() < 16
            && !channel.is_empty()
            && !id.is_empty()
            && group.is_none_or(is_group)
            && is_digits(limit)
            && limit.len() < 16
            && is_positive(count)
            && count.len() < 5;
        is_valid.then(|| Entry {
            px: number(px),
            channel,
            id,
            group,
            limit: call::count(limit),
            count: call::count(count),
        })
    }
}

/// Channel of a waiter for a place in a group, as `mutex/grant.lua` reads it. `None` if the entry
/// is not of such a waiter.
pub(super) fn channel_in_group(entry: &[u8]) -> Option<&[u8]> {
    let (name, rest) = split(entry.strip_prefix(b"distlock:")?, b'/')?;
    let (numbers, rest) = split(rest, b' ')?;
    let (channel, _) = split(rest, b' ')?;
    let is_group = !name.is_empty() && name.iter().all(u8::is_ascii_lowercase);
    (is_group && !numbers.is_empty() && !channel.is_empty()).then_some(channel)
}

fn split(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|byte| *byte == at)?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

fn is_positive(digits: &[u8]) -> bool {
    is_digits(digits) && !digits.starts_with(b"0")
}
