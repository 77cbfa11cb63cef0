//! Reads the host's memory: the machine's, or the limit of a container.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::{Error, Result};
use brimful_plan::bytes::Bytes;

/// Memory of the machine, or of the container that this process runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostMemory {
    pub(crate) total: Bytes,
    /// Memory that programs can still take without swapping.
    pub(crate) available: Bytes,
}

/// Returns the host memory that programs can still take without swapping, within the limit of this process's
/// container.
///
/// # Errors
/// When the system does not report it, as outside Linux.
pub fn host_available() -> Result<Bytes> {
    Ok(host()?.available)
}

/// Reads the host's memory.
pub(crate) fn host() -> Result<HostMemory> {
    let unreadable = || Error::Torch("cannot read /proc/meminfo: brimful needs Linux".into());
    let text = fs::read_to_string("/proc/meminfo").map_err(|_| unreadable())?;
    let machine = machine(&text).ok_or_else(unreadable)?;
    let limits = OWN.iter().filter_map(|group| group.memory(machine.total));
    Ok(limits.fold(machine, HostMemory::within))
}

impl HostMemory {
    /// Returns the smaller total, and the smaller available memory.
    fn within(self, limit: Self) -> Self {
        Self { total: self.total.min(limit.total), available: self.available.min(limit.available) }
    }
}

/// Control groups of this process.
static OWN: LazyLock<Vec<ControlGroup>> =
    LazyLock::new(|| groups(&fs::read_to_string("/proc/self/cgroup").unwrap_or_default()));

fn machine(meminfo: &str) -> Option<HostMemory> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(Bytes(kib * 1024))
    };
    Some(HostMemory { total: field("MemTotal:")?, available: field("MemAvailable:")? })
}

/// Folder of a control group, and the names of its files there.
struct ControlGroup {
    folder: PathBuf,
    limit: &'static str,
    used: &'static str,
    /// Key, in the group's statistics, of the bytes of cached files, which the system can drop.
    dropped: &'static str,
}

/// Returns the control groups of this process and their ancestors, whose limits also apply.
fn groups(own: &str) -> Vec<ControlGroup> {
    let mut groups = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(kinds), Some(path)) = (fields.next(), fields.next()) else { continue };
        let above = Path::new(path.trim_start_matches('/')).ancestors();
        let [root, limit, used, dropped] = if kinds.is_empty() {
            ["/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "]
        } else if kinds.split(',').any(|kind| kind == "memory") {
            let [limit, used] = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
            ["/sys/fs/cgroup/memory", limit, used, "total_inactive_file "]
        } else {
            continue;
        };
        let group =
            |path| ControlGroup { folder: Path::new(root).join(path), limit, used, dropped };
        groups.extend(above.map(group));
    }
    groups
}

impl ControlGroup {
    /// Returns the group's limit and free memory; `None` if it has no limit below the machine's memory. Reads the
    /// statistics only for such a limit, because reading them may take a while.
    fn memory(&self, machine: Bytes) -> Option<HostMemory> {
        let read = |name: &str| fs::read_to_string(self.folder.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let total = number(self.limit).filter(|total| *total < machine.0)?;
        let used = number(self.used)?;
        let statistics = read("memory.stat").unwrap_or_default();
        let dropped = statistics.lines().find_map(|line| line.strip_prefix(self.dropped));
        let dropped = dropped.and_then(|number| number.trim().parse::<u64>().ok()).unwrap_or(0);
        let available = total.saturating_sub(used.saturating_sub(dropped));
        Some(HostMemory { total: Bytes(total), available: Bytes(available) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_read_with_those_above_it() {
        let folders = |own: &str| -> Vec<String> {
            groups(own).iter().map(|group| group.folder.display().to_string()).collect()
        };
        assert_eq!(
            folders("0::/user/run\n"),
            ["/sys/fs/cgroup/user/run", "/sys/fs/cgroup/user", "/sys/fs/cgroup/"]
        );
        let old = folders("7:cpu,memory:/job\n2:pids:/job\n");
        assert_eq!(old, ["/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory/"]);
    }

    #[test]
    fn a_limit_holds_where_it_is_below_the_machines_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text);
        write("memory.current", "700\n").expect("written");
        write("memory.stat", "anon 500\ninactive_file 200\n").expect("written");
        let own = || ControlGroup { folder: folder.path().to_owned(), ..groups("0::/").remove(0) };

        let machine = machine("MemTotal: 2 kB\nMemAvailable: 1 kB\n").expect("both are there");
        assert_eq!(machine, HostMemory { total: Bytes(2048), available: Bytes(1024) });
        write("memory.max", "max\n").expect("written");
        let memory = || own().memory(machine.total);
        assert_eq!(memory(), None);
        write("memory.max", "1000\n").expect("written");
        let limit = memory().expect("a limit");
        assert_eq!(limit, HostMemory { total: Bytes(1000), available: Bytes(500) });
        assert_eq!(machine.within(limit), limit);
        write("memory.max", "9000\n").expect("written");
        assert_eq!(memory(), None, "the machine has less");
    }
}
