//! `distlock mysql-schema` and `distlock prune`: the table of the locks in MySQL.

use distlock::{MySqlConfig, MySqlMgr};

use crate::{
    args::{Prune, Servers},
    connect,
    exit::{Exit, Outcome},
    format, output,
};

pub(crate) fn print_schema(servers: &Servers) -> Outcome {
    let statement = connect::with_table(MySqlConfig::new(""), servers).table_statement()?;
    output::print(&format!("{statement};\n"))?;
    Ok(Exit::Success)
}

pub(crate) fn prune(servers: &Servers, options: &Prune) -> Outcome {
    let why_not = "Redis and Valkey delete what is left of a lock on their own";
    let config = connect::config(servers)?.mysql_only("prune", why_not)?;
    let deleted = MySqlMgr::new(config)?.prune(options.older_than)?;
    let rows = if deleted == 1 { "row" } else { "rows" };
    output::print(&format!(
        "deleted {deleted} {rows} of locks that nobody had acquired for {}\n",
        format::duration(options.older_than)
    ))?;
    Ok(Exit::Success)
}
