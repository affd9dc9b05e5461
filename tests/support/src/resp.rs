//! The part of the Redis protocol that is needed to split a stream into frames.

use std::io::{self, Read};

/// Encodes a request.
pub fn request(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n{word}\r\n", word.len()).into_bytes());
    }
    bytes
}

/// Splits a stream of requests or replies into frames.
#[derive(Default)]
pub struct Frames {
    buffer: Vec<u8>,
}

impl Frames {
    /// Removes and returns the next frame, if it has arrived in full.
    pub fn take_frame(&mut self) -> Option<Vec<u8>> {
        self.take(frame_end(&self.buffer, 0)?)
    }

    pub(crate) fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        let rest = self.buffer.split_off(length);
        Some(std::mem::replace(&mut self.buffer, rest))
    }

    pub(crate) fn buffered(&self) -> &[u8] {
        &self.buffer
    }

    /// Reads once from `source` and returns the number of bytes; 0 means that the stream has ended.
    pub fn fill(&mut self, mut source: impl Read) -> io::Result<usize> {
        let mut chunk = [0; 16 * 1024];
        let read = source.read(&mut chunk)?;
        self.buffer.extend_from_slice(&chunk[..read]);
        Ok(read)
    }
}

/// The words of a request, which is either an array of bulk strings or an inline command.
pub(crate) fn words(frame: &[u8]) -> Vec<Vec<u8>> {
    if frame.first() != Some(&b'*') {
        let words = frame.split(u8::is_ascii_whitespace);
        return words.filter(|word| !word.is_empty()).map(<[u8]>::to_vec).collect();
    }
    let mut words = Vec::new();
    let mut at = line_end(frame, 0).unwrap_or(frame.len());
    while let Some(start) = line_end(frame, at) {
        let Some(end) = frame_end(frame, at) else {
            break;
        };
        words.push(frame.get(start..end - 2).unwrap_or_default().to_vec());
        at = end;
    }
    words
}

/// The kind of a message that may arrive without a request, such as `message` or `subscribe`.
pub(crate) fn push_kind(frame: &[u8]) -> Option<Vec<u8>> {
    if !matches!(frame.first(), Some(b'*' | b'>')) {
        return None;
    }
    let start = line_end(frame, 0)?;
    if frame.get(start) != Some(&b'$') {
        return None;
    }
    let text = line_end(frame, start)?;
    let end = frame_end(frame, start)?;
    frame.get(text..end - 2).map(<[u8]>::to_ascii_lowercase)
}

fn frame_end(bytes: &[u8], at: usize) -> Option<usize> {
    let end = line_end(bytes, at)?;
    // A negative count means nil.
    let count = || {
        let digits = str::from_utf8(&bytes[at + 1..end - 2]).ok()?;
        Some(digits.parse::<i64>().ok()?.try_into().unwrap_or(0))
    };
    let items = match bytes[at] {
        b'$' | b'=' | b'!' if bytes.get(at + 1) == Some(&b'-') => return Some(end),
        b'$' | b'=' | b'!' => {
            let end = end + count()? + 2;
            return (end <= bytes.len()).then_some(end);
        }
        b'*' | b'~' | b'>' => count()?,
        b'%' => 2 * count()?,
        // Attributes precede the reply that they belong to.
        b'|' => 2 * count()? + 1,
        _ => return Some(end),
    };
    (0..items).try_fold(end, |at, _| frame_end(bytes, at))
}

/// The index after the line that begins at `at`.
fn line_end(bytes: &[u8], at: usize) -> Option<usize> {
    let line = bytes.get(at..)?;
    let length = line.windows(2).position(|pair| pair == b"\r\n")?;
    Some(at + length + 2)
}
