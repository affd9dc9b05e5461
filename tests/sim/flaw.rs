//! Defects of servers, to show that the simulator detects them. Each changes a call of a script
//! before it runs, or what it has done.

use distlock::testing::servers::{Bytes, Data, Keys, Script};
use redis::Value;

/// A defect to build into the servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// A release deletes the key of any holder.
    ReleaseWithoutOwner,
    /// An acquire takes the lock although it is held.
    AcquireStealsLock,
    /// A reader, or a client that asks for permits, gets the lock although others hold it.
    SharingStealsLock,
    /// Permits have no limit.
    LimitIgnored,
    /// The release of a member leaves the group, whose key is deleted.
    MemberReleasesAll,
    /// A request is executed although it has expired.
    ExecutesExpired,
    /// Tokens count from one, and the count is lost with the data.
    TokensLostWithData,
    /// A release forgets the token of the lock.
    FenceNotRaised,
    /// The same token may be issued twice.
    TokensRepeat,
    /// A renewal succeeds although another client holds the lock.
    RenewsAnyHolder,
    /// A renewal reports that the lock is gone, although it is held.
    RenewsNobody,
    /// Keys expire a tenth of their lifetime too early.
    ExpiresEarly,
}

/// Key under which `TokensLostWithData` counts.
const COUNT: &[u8] = b"flaw:count";
const NEVER: &[u8] = b"9999999999999999";

/// A value with the millisecond in which it expires.
type Stored = Option<(Data, Option<u64>)>;

/// A call of a script by a flawed server.
pub(crate) struct FlawedCall {
    flaw: Flaw,
    script: Script,
    keys: Vec<Bytes>,
    now_us: u64,
    /// The values of the keys before the call.
    before: Vec<Stored>,
}

fn stored(keys: &Keys, key: &[u8], now_us: u64) -> Stored {
    let mut entries = keys.live_entries(now_us);
    entries.find(|(other, ..)| *other == key).map(|(_, data, expires)| (data.clone(), expires))
}

fn text(stored: &Stored) -> Option<&Bytes> {
    match stored {
        Some((Data::Text(text), _)) => Some(text),
        _ => None,
    }
}

fn number(text: Option<&Bytes>) -> u64 {
    text.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok()).unwrap_or(0)
}

impl FlawedCall {
    /// Changes a call before it runs. `rest` is the number of keys, the keys, and the arguments.
    pub(crate) fn begin(
        flaw: Flaw,
        script: Script,
        rest: &mut [Bytes],
        keys: &mut Keys,
        now_us: u64,
    ) -> FlawedCall {
        let count = number(rest.first()) as usize;
        let names = rest[1..=count].to_vec();
        let args = &mut rest[count + 1..];
        let holder = keys.peek(&names[0], now_us).map(<[u8]>::to_vec);
        match (flaw, script) {
            (Flaw::ReleaseWithoutOwner, Script::Release) => {
                args[1] = holder.unwrap_or_else(|| args[1].clone());
            }
            (Flaw::AcquireStealsLock, Script::Acquire) if holder.is_some() => {
                keys.put(&names[0], None, None);
            }
            (Flaw::SharingStealsLock, Script::AcquireGroup)
                if holder.as_ref().is_some_and(|holder| *holder != args[7]) =>
            {
                keys.put(&names[0], None, None);
            }
            (Flaw::LimitIgnored, Script::AcquireGroup) => args[8] = b"0".to_vec(),
            (Flaw::MemberReleasesAll, Script::ReleaseGroup) => {
                keys.put(&names[0], None, None);
            }
            (Flaw::ExecutesExpired, Script::Acquire) => args[3] = NEVER.into(),
            (Flaw::ExecutesExpired, Script::Release) => args[3].clear(),
            _ => {}
        }
        let before = names.iter().map(|name| stored(keys, name, now_us)).collect();
        FlawedCall { flaw, script, keys: names, now_us, before }
    }

    /// Changes what the call has done: the keys, the reply and the published messages.
    pub(crate) fn end<'m>(
        &self,
        keys: &mut Keys,
        reply: &mut Value,
        payloads: impl Iterator<Item = &'m mut Bytes>,
    ) {
        let is_for_one_lock = matches!(self.script, Script::Acquire | Script::Release);
        match self.flaw {
            Flaw::FenceNotRaised if is_for_one_lock => {
                let (data, expires) = self.before[3].clone().unzip();
                keys.put(&self.keys[3], data, expires.flatten());
            }
            Flaw::TokensLostWithData if is_for_one_lock => {
                self.replace_new_token(keys, reply, payloads, |keys, _| {
                    let count = number(keys.peek(COUNT, 0).map(<[u8]>::to_vec).as_ref()) + 1;
                    // It expires, because a key that does not would be reported as left over.
                    keys.put(COUNT, Some(Data::Text(count.to_string().into())), Some(u64::MAX));
                    count
                });
            }
            Flaw::TokensRepeat if is_for_one_lock => {
                let last = [2, 3].map(|at| number(text(&self.before[at]))).into_iter().max();
                self.replace_new_token(keys, reply, payloads, |_, new| match last {
                    Some(last) if new == last + 1 => last,
                    _ => new,
                });
            }
            Flaw::RenewsAnyHolder | Flaw::RenewsNobody if self.script == Script::Renew => {
                let Value::Array(parts) = reply else { return };
                for part in &mut parts[1..] {
                    match (&*part, self.flaw) {
                        (Value::BulkString(_), Flaw::RenewsAnyHolder) => *part = Value::Int(1),
                        (Value::Int(1), Flaw::RenewsNobody) => *part = Value::Int(0),
                        _ => {}
                    }
                }
            }
            Flaw::ExpiresEarly => {
                for (key, before) in self.keys.iter().zip(&self.before) {
                    let after = stored(keys, key, self.now_us);
                    if key.starts_with(b"lock:")
                        && after != *before
                        && let Some((data, Some(at))) = after
                    {
                        let early = (at - self.now_us / 1_000) / 10;
                        keys.put(key, Some(data), Some(at - early));
                    }
                }
            }
            _ => {}
        }
    }

    /// Replaces a token that the call has issued: under its key, in the reply, and in the message.
    fn replace_new_token<'m>(
        &self,
        keys: &mut Keys,
        reply: &mut Value,
        payloads: impl Iterator<Item = &'m mut Bytes>,
        replace: impl FnOnce(&mut Keys, u64) -> u64,
    ) {
        let after = stored(keys, &self.keys[2], self.now_us);
        let Some((Data::Text(new), expires)) = after.clone() else { return };
        if text(&self.before[2]) == Some(&new) {
            return;
        }
        let token = replace(keys, number(Some(&new)));
        let token = format!("{token:016}").into_bytes();
        keys.put(&self.keys[2], Some(Data::Text(token.clone())), expires);
        if let Value::BulkString(line) = reply
            && line.ends_with(&[b" ", &*new].concat())
        {
            let text = String::from_utf8_lossy(line);
            match text.split_once(" fenced ") {
                // Another token than the time.
                Some((nonce, now)) => *line = format!("{nonce} held {now} ").into_bytes(),
                None => line.truncate(line.len() - new.len()),
            }
            line.extend(&token);
        }
        for payload in payloads.filter(|payload| payload.starts_with(&new)) {
            payload.splice(..new.len(), token.clone());
        }
    }
}
