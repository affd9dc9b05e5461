//! The simulated network and the servers behind it. A connection delivers its packets in order.
//! Packets can be delayed, held up and lost.

use std::{collections::VecDeque, io};

use distlock::testing::servers::{Bytes, Keys};

use super::{
    node::{FakeNode, take_request},
    world::{Clock, Event, MS, ProcessState, Sim, Time, US},
};

#[derive(Debug)]
enum Packet {
    Data(Bytes),
    /// The sender has closed its direction.
    Fin,
    Reset,
}

/// One direction of a connection.
#[derive(Debug, Default)]
struct Direction {
    /// Packets on their way, each with its time of arrival.
    in_flight: VecDeque<(Time, Packet)>,
    /// Packets that wait because the link is blocked.
    blocked: VecDeque<Packet>,
    last_arrival: Time,
}

#[derive(Debug, Default)]
pub(crate) struct Connection {
    process: usize,
    node: usize,
    is_loopback: bool,
    to_node: Direction,
    to_client: Direction,
    /// Bytes that the client can read.
    inbox: VecDeque<u8>,
    fin_received: bool,
    reset: bool,
    /// The client has closed the connection.
    closed: bool,
    /// Bytes received by the server that are not a complete request yet.
    request_buffer: Bytes,
    /// The server has dropped the connection.
    dropped: bool,
    /// The client has closed the connection, and the server has not processed that yet.
    fin_pending: bool,
    /// The connection breaks as soon as the server has executed the next request.
    break_after_next: bool,
}

/// Delays and losses between a process and a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    pub(crate) min_delay: Time,
    pub(crate) max_delay: Time,
    /// Packets per million that are lost at first, and sent again within `retransmit_after`.
    pub(crate) losses_per_million: u32,
    pub(crate) retransmit_after: Time,
    pub(crate) to_node_blocked: bool,
    pub(crate) to_client_blocked: bool,
}

impl Default for Link {
    fn default() -> Link {
        Link {
            min_delay: 50 * US,
            max_delay: 300 * US,
            losses_per_million: 0,
            retransmit_after: 200 * MS,
            to_node_blocked: false,
            to_client_blocked: false,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) fake: FakeNode,
    pub(crate) clock: Clock,
    pub(crate) up: bool,
    /// Stopped, as by SIGSTOP: the system still accepts connections and requests.
    pub(crate) stopped: bool,
    /// Time of the last start during the run; zero if it was running from the start.
    pub(crate) started_at: Time,
    /// Times at which it came back without some of its data.
    pub(crate) forgot_at: Vec<Time>,
    /// The data that it would find on its disk after a crash.
    pub(crate) disk: Keys,
    pub(crate) requests_served: u64,
}

impl Server {
    /// Microseconds on the clock of the server.
    pub(crate) fn now_us(&self, now: Time) -> u64 {
        self.clock.at(now) / 1_000
    }
}

#[derive(Debug, Default)]
pub(crate) struct Net {
    pub(crate) connections: Vec<Connection>,
    pub(crate) servers: Vec<Server>,
    /// By process, then by node.
    pub(crate) links: Vec<Vec<Link>>,
    /// Requests per million after whose execution the connection breaks.
    pub(crate) breaks_per_million: u32,
    /// Node and name of each string key that was written or deleted since the last check.
    pub(crate) changed_keys: Vec<(usize, Bytes)>,
    /// Node and lock identifier of each acquire that was granted since the last check.
    pub(crate) granted: Vec<(usize, String)>,
}

impl Net {
    pub(crate) fn loopback(&mut self) -> u64 {
        self.connections.push(Connection { is_loopback: true, ..Connection::default() });
        self.connections.len() as u64 - 1
    }

    pub(crate) fn readable(&self, connections: &[u64]) -> Vec<bool> {
        let readable = |number: &u64| {
            let one = &self.connections[*number as usize];
            !one.inbox.is_empty() || one.fin_received || one.reset || one.closed
        };
        connections.iter().map(readable).collect()
    }

    pub(crate) fn read(
        &mut self,
        connection: u64,
        buffer: &mut [u8],
        peek: bool,
    ) -> io::Result<usize> {
        let one = &mut self.connections[connection as usize];
        let length = one.inbox.len().min(buffer.len());
        if length > 0 {
            for (to, from) in buffer.iter_mut().zip(&one.inbox) {
                *to = *from;
            }
            if !peek {
                one.inbox.drain(..length);
            }
            return Ok(length);
        }
        match one {
            Connection { reset: true, .. } => Err(io::ErrorKind::ConnectionReset.into()),
            Connection { fin_received: true, .. } | Connection { closed: true, .. } => Ok(0),
            _ => Err(io::ErrorKind::WouldBlock.into()),
        }
    }
}

impl Sim {
    /// Connects the running thread to a node; `host` ends with the node's number.
    pub(crate) fn connect_to(&self, host: &str, deadline: Time) -> io::Result<u64> {
        let node: usize = host.trim_start_matches("10.0.0.").parse().expect("the number of a node");
        let process = self.process();
        loop {
            if self.is_shutting_down() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let link = self.net.borrow().links[process][node];
            let blocked = link.to_node_blocked || link.to_client_blocked;
            let lost = self.chance(link.losses_per_million);
            let trip = if lost {
                link.retransmit_after
            } else {
                self.between(2 * link.min_delay, 2 * link.max_delay)
            };
            let left = deadline.saturating_sub(self.now.get());
            self.note_slow_trip(process, node, trip / 2);
            if blocked || trip >= left {
                self.sleep(left.min(if blocked { 20 * MS } else { left }));
                if self.now.get() >= deadline {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                continue;
            }
            self.sleep(trip);
            let mut net = self.net.borrow_mut();
            if !net.servers[node].up {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            net.connections.push(Connection { process, node, ..Connection::default() });
            return Ok(net.connections.len() as u64 - 1);
        }
    }

    pub(crate) fn send(&self, connection: u64, bytes: &[u8]) -> io::Result<usize> {
        let loops = {
            let mut net = self.net.borrow_mut();
            let breaks_per_million = net.breaks_per_million;
            let one = &mut net.connections[connection as usize];
            if one.closed || one.reset {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            if one.is_loopback {
                one.inbox.extend(bytes);
            } else {
                one.break_after_next = self.chance(breaks_per_million);
            }
            one.is_loopback
        };
        if loops {
            self.wake_readers(connection);
        } else if self.chance(20_000) && bytes.len() > 1 {
            // Split into two segments.
            let (first, second) = bytes.split_at(bytes.len() / 2);
            self.transmit(connection, true, Packet::Data(first.to_vec()));
            self.transmit(connection, true, Packet::Data(second.to_vec()));
        } else {
            self.transmit(connection, true, Packet::Data(bytes.to_vec()));
        }
        Ok(bytes.len())
    }

    /// The client closes the connection.
    pub(crate) fn close_connection(&self, connection: u64) {
        let connected = {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            !std::mem::replace(&mut one.closed, true) && !one.is_loopback && !one.reset
        };
        if connected && !self.is_shutting_down() {
            self.transmit(connection, true, Packet::Fin);
        }
    }

    /// Sends a packet.
    fn transmit(&self, connection: u64, out: bool, packet: Packet) {
        let link = {
            let net = self.net.borrow();
            let one = &net.connections[connection as usize];
            net.links[one.process][one.node]
        };
        let blocked = if out { link.to_node_blocked } else { link.to_client_blocked };
        let mut delay = self.between(link.min_delay, link.max_delay);
        if self.chance(link.losses_per_million) {
            delay += self.between(link.retransmit_after / 2, link.retransmit_after);
        }
        let mut net = self.net.borrow_mut();
        let one = &mut net.connections[connection as usize];
        let direction = if out { &mut one.to_node } else { &mut one.to_client };
        if blocked || !direction.blocked.is_empty() {
            direction.blocked.push_back(packet);
            return;
        }
        // Packets of one connection never overtake each other.
        direction.last_arrival = direction.last_arrival.max(self.now.get() + delay);
        let at = direction.last_arrival;
        direction.in_flight.push_back((at, packet));
        let (process, node) = (one.process, one.node);
        drop(net);
        self.note_slow_trip(process, node, at - self.now.get());
        self.schedule(at, Event::Arrive { connection, at_node: out });
    }

    /// Logs a trip that takes longer than usual as a fault.
    fn note_slow_trip(&self, process: usize, node: usize, span: Time) {
        let mut fault_log = self.fault_log.borrow_mut();
        if span > fault_log.usual_delay {
            fault_log.add_fault(process, node, self.now.get() + span);
        }
    }

    /// Sends the packets that were held up by a blocked link.
    pub(crate) fn unblock(&self, process: usize, node: usize) {
        let blocked: Vec<_> = {
            let mut net = self.net.borrow_mut();
            let link = &mut net.links[process][node];
            (link.to_node_blocked, link.to_client_blocked) = (false, false);
            let on_link =
                |one: &Connection| !one.is_loopback && (one.process, one.node) == (process, node);
            let numbered = net.connections.iter_mut().enumerate().filter(|(_, one)| on_link(one));
            let take = |(number, one): (usize, &mut Connection)| {
                (
                    number as u64,
                    std::mem::take(&mut one.to_node.blocked),
                    std::mem::take(&mut one.to_client.blocked),
                )
            };
            numbered.map(take).collect()
        };
        for (connection, out, back) in blocked {
            out.into_iter().for_each(|packet| self.transmit(connection, true, packet));
            back.into_iter().for_each(|packet| self.transmit(connection, false, packet));
        }
    }

    pub(crate) fn arrive(&self, connection: u64, at_node: bool) {
        let packet = {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            let direction = if at_node { &mut one.to_node } else { &mut one.to_client };
            match direction.in_flight.front() {
                Some((at, _)) if *at <= self.now.get() => direction.in_flight.pop_front(),
                // The connection has broken since this arrival was scheduled.
                _ => None,
            }
        };
        match packet {
            Some((_, packet)) if at_node => self.arrive_at_node(connection, packet),
            Some((_, packet)) => self.arrive_at_client(connection, packet),
            None => {}
        }
    }

    fn arrive_at_client(&self, connection: u64, packet: Packet) {
        {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            match packet {
                Packet::Data(bytes) => one.inbox.extend(bytes),
                Packet::Fin => one.fin_received = true,
                Packet::Reset => one.reset = true,
            }
        }
        self.wake_readers(connection);
    }

    fn arrive_at_node(&self, connection: u64, packet: Packet) {
        let connected = {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            if one.dropped {
                matches!(packet, Packet::Data(_)).then_some(false)
            } else {
                match packet {
                    Packet::Data(bytes) => one.request_buffer.extend(bytes),
                    Packet::Fin | Packet::Reset => one.fin_pending = true,
                }
                Some(true)
            }
        };
        match connected {
            Some(true) => self.serve(connection),
            // The server has no such connection, so it answers with a reset.
            Some(false) => self.transmit(connection, false, Packet::Reset),
            None => {}
        }
    }

    /// Executes the complete requests that a server has received over a connection.
    fn serve(&self, connection: u64) {
        loop {
            let now = self.now.get();
            let (outcome, break_now) = {
                let mut net = self.net.borrow_mut();
                let Net { connections, servers, changed_keys, granted, .. } = &mut *net;
                let one = &mut connections[connection as usize];
                let server = &mut servers[one.node];
                if server.stopped || !server.up || one.dropped {
                    return;
                }
                let Some(request) = take_request(&mut one.request_buffer) else {
                    if std::mem::take(&mut one.fin_pending) {
                        one.dropped = true;
                        server.fake.disconnect(connection);
                    }
                    return;
                };
                server.requests_served += 1;
                let now_us = server.now_us(now);
                let outcome = server.fake.execute(connection, &request, now_us);
                self.log(|| {
                    let request = format_request(&request);
                    format!(
                        "        request to node {} over connection {connection}: {request}",
                        one.node
                    )
                });
                let has = |word: &[u8]| outcome.reply.windows(word.len()).any(|part| part == word);
                // The requests for one mutex, with and without what only waiters need.
                if [17, 14].contains(&request.len()) && (has(b" held ") || has(b" fenced ")) {
                    granted.push((one.node, String::from_utf8_lossy(&request[8]).into_owned()));
                }
                changed_keys.extend(outcome.changed_keys.iter().map(|key| (one.node, key.clone())));
                (outcome, std::mem::take(&mut one.break_after_next))
            };
            self.log(|| {
                format!(
                    "        reply over connection {connection}: {}",
                    format_reply(&outcome.reply)
                )
            });
            for (peer, message) in outcome.messages {
                self.transmit(peer, false, Packet::Data(message));
            }
            if break_now {
                self.break_connection(connection);
                return;
            }
            self.transmit(connection, false, Packet::Data(outcome.reply));
        }
    }

    /// Breaks a connection. In each direction, a random part of the packets in flight is lost.
    pub(crate) fn break_connection(&self, connection: u64) {
        let cut = |direction: &mut Direction| {
            let kept = self.rng.borrow_mut().usize(..=direction.in_flight.len());
            direction.in_flight.truncate(kept);
            direction.blocked.clear();
        };
        {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            if one.is_loopback {
                return;
            }
            cut(&mut one.to_node);
            cut(&mut one.to_client);
            self.fault_log.borrow_mut().add_fault(one.process, one.node, self.now.get());
        }
        self.log(|| format!("connection {connection} breaks"));
        self.transmit(connection, true, Packet::Reset);
        self.transmit(connection, false, Packet::Reset);
    }

    /// The connections that a server still has and that match `which`, called with process and
    /// node.
    pub(crate) fn connections_where(&self, which: impl Fn(usize, usize) -> bool) -> Vec<u64> {
        let net = self.net.borrow();
        let matches =
            |one: &Connection| !one.is_loopback && !one.dropped && which(one.process, one.node);
        net.connections
            .iter()
            .enumerate()
            .filter(|(_, one)| matches(one))
            .map(|(number, _)| number as u64)
            .collect()
    }

    /// Crashes a process. Its system closes its connections, unless there was a power loss.
    pub(crate) fn crash_process(&self, process: usize, power_loss: bool) {
        self.pause(process, ProcessState::Dead);
        for connection in self.connections_where(|of, _| of == process) {
            let mut net = self.net.borrow_mut();
            let one = &mut net.connections[connection as usize];
            one.closed = true;
            if power_loss {
                one.to_node.blocked.clear();
            }
            drop(net);
            if !power_loss {
                self.transmit(connection, true, Packet::Fin);
            }
        }
    }

    pub(crate) fn stop_node(&self, node: usize) {
        self.net.borrow_mut().servers[node].stopped = true;
    }

    pub(crate) fn continue_node(&self, node: usize) {
        self.net.borrow_mut().servers[node].stopped = false;
        for connection in self.connections_where(|_, of| of == node) {
            self.serve(connection);
        }
    }

    /// Crashes a server. Its system closes its connections, unless there was a power loss.
    pub(crate) fn crash_node(&self, node: usize, power_loss: bool) {
        self.net.borrow_mut().servers[node].up = false;
        for connection in self.connections_where(|_, of| of == node) {
            let mut net = self.net.borrow_mut();
            net.connections[connection as usize].dropped = true;
            net.servers[node].fake.disconnect(connection);
            drop(net);
            if !power_loss {
                self.transmit(connection, false, Packet::Fin);
            }
        }
    }

    /// Starts a server with the data that it had in memory, with that on its disk, or with none.
    pub(crate) fn start_node(&self, node: usize, data: RestartData) {
        let run = self.rng.borrow_mut().u64(..);
        let now = self.now.get();
        let mut net = self.net.borrow_mut();
        let server = &mut net.servers[node];
        let now_us = server.now_us(now);
        let keys = match data {
            RestartData::Kept => server.fake.keys.clone(),
            RestartData::Disk => server.disk.clone(),
            RestartData::Empty => Keys::default(),
        };
        if data != RestartData::Kept {
            server.forgot_at.push(now);
        }
        server.fake.restart(run, now_us, keys);
        (server.up, server.stopped, server.started_at) = (true, false, now);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestartData {
    Kept,
    Disk,
    Empty,
}

fn format_request(request: &[Bytes]) -> String {
    // Leaves out the text or hash of a script.
    let words = request.iter().enumerate().filter(|(at, _)| *at != 1 || request.len() < 4);
    let words = words
        .map(|(_, word)| String::from_utf8_lossy(word))
        .map(|word| word[word.len().saturating_sub(40)..].to_owned());
    words.collect::<Vec<_>>().join(" ")
}

fn format_reply(reply: &[u8]) -> String {
    String::from_utf8_lossy(reply).replace("\r\n", " ").chars().take(140).collect()
}
