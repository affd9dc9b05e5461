//! The packets of the MySQL protocol: bytes in, values out.
//!
//! Everything here comes from a server, which may be broken or hostile. Each function returns
//! [`Malformed`] for what it does not understand, and sizes are limited.

use mysql_common::io::ParseBuf;

/// Maximum size of a reply, in the memory that it takes. The replies to our statements are far
/// smaller, so a longer one is an error or an attack.
pub(super) const REPLY_BYTES_MAX: usize = 4 << 20;
/// Maximum number of columns of a row; our statements ask for fewer.
const COLUMNS_MAX: u64 = 64;
/// Memory for a value or a result, apart from its bytes.
const ITEM_BYTES: usize = 64;
const HEADER_BYTES: usize = 4;
/// A packet of this size continues in the next one. None of ours does.
const PAYLOAD_BYTES_LIMIT: usize = 0xff_ffff;

const STATUS_IN_TRANSACTION: u16 = 1;
const STATUS_MORE_RESULTS: u16 = 8;

/// What is wrong with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

/// An error that the server replied. Contains no secrets and no control characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServerError {
    pub(super) code: u16,
    pub(super) message: String,
}

/// Result of one statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StatementResult {
    Done {
        affected_rows: u64,
        last_insert_id: u64,
        in_transaction: bool,
    },
    Rows {
        rows: Vec<Vec<Option<Vec<u8>>>>,
        in_transaction: bool,
    },
    /// The server has skipped the statements that follow, so this is always the last result.
    Refused(ServerError),
}

/// One packet: its number in the exchange, and its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    pub(super) number: u8,
    pub(super) payload: &'a [u8],
}

impl Packet<'_> {
    /// Whether this is an error. Servers also send one before they close a connection.
    pub(super) fn is_error(&self) -> bool {
        self.payload.first() == Some(&0xff)
    }
}

/// Appends a packet. Returns `false` if the payload is too long for one.
pub(super) fn write_packet(out: &mut Vec<u8>, number: u8, payload: &[&[u8]]) -> bool {
    let length: usize = payload.iter().map(|part| part.len()).sum();
    if length >= PAYLOAD_BYTES_LIMIT {
        return false;
    }
    out.extend_from_slice(&length.to_le_bytes()[..3]);
    out.push(number);
    payload.iter().for_each(|part| out.extend_from_slice(part));
    true
}

/// Returns the first packet, and the bytes after it; `None` if it is not complete.
pub(super) fn split_packet(bytes: &[u8]) -> Result<Option<(Packet<'_>, &[u8])>, Malformed> {
    let Some((&[low, middle, high, number], rest)) = bytes.split_first_chunk::<HEADER_BYTES>()
    else {
        return Ok(None);
    };
    let length = u32::from_le_bytes([low, middle, high, 0]) as usize;
    if length > REPLY_BYTES_MAX {
        return Err(Malformed("a packet is longer than 4 MiB"));
    }
    let packet = rest.split_at_checked(length);
    Ok(packet.map(|(payload, rest)| (Packet { number, payload }, rest)))
}

/// A number whose first byte is the number itself, or says how many bytes follow. The library reads
/// NULL and an error as 0.
fn length_encoded(fields: &mut ParseBuf<'_>) -> Option<u64> {
    match fields.0.first() {
        Some(0xfb | 0xff) => None,
        _ => fields.checked_eat_lenenc_int(),
    }
}

impl ServerError {
    /// Parses an error packet. `quote` removes secrets from the text and makes it printable.
    pub(super) fn parse(
        payload: &[u8],
        quote: impl Fn(&str) -> String,
    ) -> Result<ServerError, Malformed> {
        let mut fields = ParseBuf(payload);
        let kind = fields.checked_eat_u8().filter(|kind| *kind == 0xff);
        let code = kind.and_then(|_| fields.checked_eat_u16_le());
        let code = code.ok_or(Malformed("an error packet is too short"))?;
        // Missing in the errors before sign-in.
        if fields.0.first() == Some(&b'#') {
            fields.checked_skip(6);
        }
        Ok(ServerError { code, message: quote(&String::from_utf8_lossy(fields.0)) })
    }
}

/// Reads the reply to one query, packet by packet.
#[derive(Debug, Default)]
pub(super) struct ReplyReader {
    results: Vec<StatementResult>,
    state: State,
    /// Number of the last packet. The query itself has number 0.
    number: u8,
    /// Memory that the reply takes.
    size: usize,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    ResultBegins,
    /// Definitions of columns, of which `left` follow, and then an EOF packet.
    Columns {
        columns: usize,
        left: usize,
    },
    Rows {
        columns: usize,
        rows: Vec<Vec<Option<Vec<u8>>>>,
    },
}

impl ReplyReader {
    /// Whether a packet has the number of the next one in this reply.
    pub(super) fn is_next(&self, packet: &Packet<'_>) -> bool {
        packet.number == self.number.wrapping_add(1)
    }

    /// Reads the next packet. Returns the results after the last one.
    pub(super) fn read(
        &mut self,
        packet: &Packet<'_>,
        quote: impl Fn(&str) -> String,
    ) -> Result<Option<Vec<StatementResult>>, Malformed> {
        if !self.is_next(packet) {
            return Err(Malformed("a packet is out of order"));
        }
        self.number = packet.number;
        self.take_memory(packet.payload.len())?;
        if packet.is_error() {
            self.results.push(StatementResult::Refused(ServerError::parse(packet.payload, quote)?));
            return Ok(Some(std::mem::take(self).results));
        }
        let (result, status) = match std::mem::take(&mut self.state) {
            State::ResultBegins => match packet.payload.first() {
                Some(0) => parse_ok(packet.payload)?,
                Some(0xfb) => return Err(Malformed("it asks for a local file")),
                _ => {
                    let columns = parse_column_count(packet.payload)?;
                    self.state = State::Columns { columns, left: columns };
                    return Ok(None);
                }
            },
            State::Columns { columns, left: 0 } => {
                parse_eof(packet.payload)?;
                self.state = State::Rows { columns, rows: Vec::new() };
                return Ok(None);
            }
            State::Columns { columns, left } => {
                self.state = State::Columns { columns, left: left - 1 };
                return Ok(None);
            }
            // A row cannot begin with this byte, because it would be longer than a packet.
            State::Rows { rows, .. } if packet.payload.first() == Some(&0xfe) => {
                let status = parse_eof(packet.payload)?;
                (StatementResult::Rows { rows, in_transaction: is_in_transaction(status) }, status)
            }
            State::Rows { columns, mut rows } => {
                self.take_memory(ITEM_BYTES.saturating_mul(columns))?;
                rows.push(parse_row(packet.payload, columns)?);
                self.state = State::Rows { columns, rows };
                return Ok(None);
            }
        };
        self.take_memory(ITEM_BYTES)?;
        self.results.push(result);
        let is_last = status & STATUS_MORE_RESULTS == 0;
        Ok(is_last.then(|| std::mem::take(self).results))
    }

    fn take_memory(&mut self, size: usize) -> Result<(), Malformed> {
        self.size = self.size.saturating_add(size);
        if self.size > REPLY_BYTES_MAX {
            return Err(Malformed("the reply is too long: more than 4 MiB"));
        }
        Ok(())
    }
}

fn is_in_transaction(status: u16) -> bool {
    status & STATUS_IN_TRANSACTION != 0
}

/// Parses the result of a statement without rows. Also returns the server's status.
fn parse_ok(payload: &[u8]) -> Result<(StatementResult, u16), Malformed> {
    let mut fields = ParseBuf(payload);
    let mut parse = || {
        fields.checked_eat_u8()?;
        let affected_rows = length_encoded(&mut fields)?;
        let last_insert_id = length_encoded(&mut fields)?;
        let status = fields.checked_eat_u16_le()?;
        let in_transaction = is_in_transaction(status);
        Some((StatementResult::Done { affected_rows, last_insert_id, in_transaction }, status))
    };
    parse().ok_or(Malformed("an OK packet is too short"))
}

/// Parses the packet after columns or rows. Returns the server's status.
fn parse_eof(payload: &[u8]) -> Result<u16, Malformed> {
    match payload {
        [0xfe, _, _, low, high] => Ok(u16::from_le_bytes([*low, *high])),
        _ => Err(Malformed("the end of columns or rows is missing")),
    }
}

fn parse_column_count(payload: &[u8]) -> Result<usize, Malformed> {
    let mut fields = ParseBuf(payload);
    match length_encoded(&mut fields) {
        Some(columns @ 1..=COLUMNS_MAX) if fields.is_empty() => Ok(columns as usize),
        _ => Err(Malformed("a reply begins with an unknown packet")),
    }
}

fn parse_row(payload: &[u8], columns: usize) -> Result<Vec<Option<Vec<u8>>>, Malformed> {
    const NULL: u8 = 0xfb;
    let mut fields = ParseBuf(payload);
    let mut row = Vec::with_capacity(columns);
    for _ in 0..columns {
        if fields.0.first() == Some(&NULL) {
            fields.checked_eat_u8();
            row.push(None);
        } else {
            let length = length_encoded(&mut fields).and_then(|length| length.try_into().ok());
            let value = length.and_then(|length| fields.checked_eat(length));
            row.push(Some(value.ok_or(Malformed("a row is too short"))?.to_vec()));
        }
    }
    if fields.is_empty() { Ok(row) } else { Err(Malformed("a row is too long")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packets(payloads: &[&[u8]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (number, payload) in payloads.iter().enumerate() {
            assert!(write_packet(&mut bytes, u8::try_from(number + 1).unwrap(), &[payload]));
        }
        bytes
    }

    fn read(mut bytes: &[u8]) -> Result<Option<Vec<StatementResult>>, Malformed> {
        let mut reader = ReplyReader::default();
        while let Some((packet, rest)) = split_packet(bytes)? {
            if let Some(results) = reader.read(&packet, str::to_owned)? {
                return Ok(Some(results));
            }
            bytes = rest;
        }
        Ok(None)
    }

    /// `BEGIN`, a query with one row of two columns, and a refused statement.
    fn recorded() -> Vec<u8> {
        packets(&[
            &[0, 0, 0, 9, 0, 0, 0],
            &[2],
            b"a definition",
            b"another definition",
            &[0xfe, 0, 0, 9, 0],
            &[2, b'4', b'2', 0xfb],
            &[0xfe, 0, 0, 9, 0],
            b"\xff\xb5\x04#HY000Lock wait timeout exceeded",
        ])
    }

    #[test]
    fn reply_to_several_statements_is_read() {
        let refused = ServerError { code: 1205, message: "Lock wait timeout exceeded".into() };
        let expected = [
            StatementResult::Done { affected_rows: 0, last_insert_id: 0, in_transaction: true },
            StatementResult::Rows {
                rows: vec![vec![Some(b"42".to_vec()), None]],
                in_transaction: true,
            },
            StatementResult::Refused(refused),
        ];
        assert_eq!(read(&recorded()).unwrap().unwrap(), expected);
    }

    #[test]
    fn incomplete_reply_is_awaited() {
        let whole = recorded();
        for end in 0..whole.len() {
            assert_eq!(read(&whole[..end]), Ok(None), "{end}");
        }
    }

    #[test]
    fn large_numbers_are_read() {
        let token = 1_795_497_331_598_981_u64;
        let ok = [&[0, 1, 0xfe][..], &token.to_le_bytes(), &[1, 0, 0, 0]].concat();
        let expected =
            StatementResult::Done { affected_rows: 1, last_insert_id: token, in_transaction: true };
        assert_eq!(read(&packets(&[&ok])).unwrap().unwrap(), [expected]);
    }

    #[test]
    fn malformed_replies_are_refused() {
        for (payloads, words) in [
            (&[&[0xfb, b'x'][..]][..], "local file"),
            (&[&[0, 0]], "too short"),
            (&[&[0xff, 1]], "too short"),
            (&[&[0xfc, 0xff, 0xff]], "unknown packet"),
            (&[&[]], "unknown packet"),
            (&[&[1], b"definition", b"no end"], "end of columns"),
            (&[&[1], b"definition", &[0xfe, 0, 0, 0, 0], &[3, b'x']], "too short"),
            (&[&[1], b"definition", &[0xfe, 0, 0, 0, 0], &[1, b'x', 1, b'y']], "too long"),
        ] {
            let Malformed(reason) = read(&packets(payloads)).unwrap_err();
            assert!(reason.contains(words), "{reason}");
        }
        let mut out_of_order = packets(&[&[0, 0, 0, 2, 0, 0, 0]]);
        out_of_order[3] = 7;
        assert_eq!(read(&out_of_order), Err(Malformed("a packet is out of order")));
    }

    #[test]
    fn size_of_a_reply_is_limited() {
        let huge = [0xff, 0xff, 0xff, 1];
        assert!(split_packet(&huge).is_err());
        // Many small rows take more memory than bytes.
        let (row, end) = ([1, b'x'], [0xfe, 0, 0, 0, 0]);
        let mut reader = ReplyReader::default();
        let mut feed = |payload: &[u8], number: usize| {
            let number = u8::try_from(number % 256).unwrap();
            reader.read(&Packet { number, payload }, str::to_owned)
        };
        for (number, payload) in [&[1][..], b"definition", &end].into_iter().enumerate() {
            assert_eq!(feed(payload, number + 1), Ok(None));
        }
        let refused = (4..REPLY_BYTES_MAX / ITEM_BYTES + 8).find_map(|n| feed(&row, n).err());
        assert_eq!(refused, Some(Malformed("the reply is too long: more than 4 MiB")));
    }

    proptest! {
        /// Fault: N148
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }

        /// Changes one byte of a valid reply.
        #[test]
        fn no_changed_reply_makes_the_reader_panic(at in 0_usize..100, byte in any::<u8>()) {
            let mut bytes = recorded();
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = read(&bytes);
        }
    }
}
