//! One request to one server, and its reply.

use super::{Connection, Exchange, NodeError, NodeErrorKind, RedisNode, Request, ScriptRef};
use crate::sys::clock::Moment;

/// Sends a request and waits for its reply until `deadline`. Connects if necessary. If the server
/// does not know the script, sends its source.
pub(crate) fn exchange<C: Request>(
    node: &RedisNode,
    connection: &mut Connection,
    request: &C,
    deadline: Moment,
) -> Result<Exchange<C::Reply>, NodeError> {
    node.connect(connection, deadline)?;
    let mut script_ref = ScriptRef::Hash;
    loop {
        let in_flight = node.send(connection, request, script_ref, deadline)?;
        let value = connection.receive(deadline)?;
        match (node.decode(connection, request, in_flight, value), script_ref) {
            (Err(failure), ScriptRef::Hash) if failure.is_unknown_script() => {
                script_ref = ScriptRef::Source;
            }
            (Err(failure), ScriptRef::Source) if failure.is_unknown_script() => {
                connection.poison();
                return Err(NodeError::outcome_unknown(NodeErrorKind::Protocol(
                    "it does not know a script that it was just sent".into(),
                )));
            }
            (result, _) => {
                if result.is_ok() {
                    node.record_success();
                }
                return result;
            }
        }
    }
}
