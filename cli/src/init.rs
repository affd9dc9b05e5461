//! `distlock init`: declares that nodes are new.

use crate::{
    args::{Init, Servers},
    connect,
    exit::{Exit, Outcome},
    output,
};

pub(crate) fn run(servers: &Servers, options: &Init) -> Outcome {
    let urls = if options.urls.is_empty() { &servers.url } else { &options.urls };
    let why_not = "a MySQL server needs no declaration, because it has no quarantine; distlock \
                   mysql-schema prints the statement that creates its table";
    let config = connect::config_for(servers, urls)?.redis_only("init", why_not)?;
    config.declare_nodes_new(options.yes)?;
    output::print(&match config.each_node().len() {
        1 => "a single server needs no declaration, because it has no quarantine\n".to_owned(),
        nodes => {
            format!("the {nodes} nodes are declared new: they vote at once until they restart\n")
        }
    })?;
    Ok(Exit::Success)
}
