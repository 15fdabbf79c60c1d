//! Snapshots freeze the guest's file systems: whatever its agent, the client or the machine does,
//! the machine goes on, and the file systems are thawed.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use container::agent::Agent;
use container::pod::freeze::Freezer;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};

use super::PATIENCE;

/// How an agent answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    Obeys,
    /// Answers a freeze when the client has given up.
    Hangs,
    /// Answers with something else than a number, and freezes.
    Lies,
    /// Knows no such command.
    Refuses,
    /// Sends nonsense for the first thaws.
    Raves,
    /// Has thawed its file systems itself, as Windows does after 10 s.
    Impatient,
    /// Disconnects at the first thaw.
    Leaves,
}

/// The deeds of guest and machine, in order.
#[derive(Clone, Default)]
struct Diary(Arc<Mutex<Vec<String>>>);

impl Diary {
    fn add(&self, line: &str) {
        self.0.lock().unwrap().push(line.to_owned());
    }

    fn count(&self, line: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|it| *it == line).count()
    }

    /// The state of the machine.
    fn state(&self) -> &'static str {
        let all = self.0.lock().unwrap();
        let last = all.iter().rev().find(|it| *it == "settle" || *it == "resume");
        if last.is_some_and(|it| it == "settle") { "paused" } else { "running" }
    }

    /// Whether the file systems are thawed, and the machine runs.
    fn is_well(&self) -> bool {
        let all = self.0.lock().unwrap();
        let last = |one: &str, two: &str| {
            all.iter().rev().find(|it| *it == one || *it == two).is_none_or(|it| it == two)
        };
        last("frozen", "thawed") && last("settle", "resume")
    }
}

async fn agent(listener: UnixListener, manner: Manner, diary: Diary) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        converse(stream, manner, &diary).await;
    }
}

async fn converse(stream: UnixStream, manner: Manner, diary: &Diary) -> Option<()> {
    let (read, mut write) = stream.into_split();
    let mut reader = BufReader::new(read);
    loop {
        let mut line = Vec::new();
        if reader.read_until(b'\n', &mut line).await.ok()? == 0 {
            return None;
        }
        let start = usize::from(line[0] == 0xff);
        let question: Value = serde_json::from_slice(&line[start..]).unwrap();
        let id = &question["arguments"]["id"];
        let answer = match question["execute"].as_str().unwrap() {
            "guest-sync-delimited" => json!({ "return": id }),
            "guest-ping" => json!({ "return": {} }),
            command => answer(command, manner, diary).await?,
        };
        let text = format!("{answer}\n");
        write.write_all(&[&line[..start], text.as_bytes()].concat()).await.ok()?;
    }
}

/// `None` disconnects.
async fn answer(command: &str, manner: Manner, diary: &Diary) -> Option<Value> {
    let thaws = diary.count("asked to thaw");
    Some(match command {
        _ if manner == Manner::Refuses => json!({ "error": { "desc": "no such command" } }),
        "guest-fsfreeze-freeze" => {
            if manner == Manner::Hangs {
                sleep(Duration::from_secs(14)).await;
            }
            diary.add("frozen");
            let count = if manner == Manner::Lies { json!(-7) } else { json!(2) };
            json!({ "return": count })
        }
        "guest-fsfreeze-status" => json!({ "return": "frozen" }),
        "guest-fsfreeze-thaw" => {
            diary.add("asked to thaw");
            match manner {
                Manner::Raves if thaws < 2 => json!({ "return": ["?"] }),
                Manner::Leaves if thaws < 1 => return None,
                _ => {
                    diary.add("thawed");
                    json!({ "return": if manner == Manner::Impatient { 0 } else { 2 } })
                }
            }
        }
        _ => json!({ "error": { "desc": "what?" } }),
    })
}

/// A machine that obeys, or refuses to settle.
async fn machine(listener: UnixListener, settles: bool, diary: Diary) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (read, mut write) = stream.into_split();
        let mut line = String::new();
        BufReader::new(read).read_line(&mut line).await.unwrap();
        let question: Value = serde_json::from_str(&line).unwrap();
        let command = question["command"].as_str().unwrap();
        let answer = match command {
            "status" => {
                let (state, continued) = (diary.state(), diary.count("resume"));
                json!({ "ok": { "state": state, "continued": continued } })
            }
            "settle" if !settles => json!({ "error": "it does not settle" }),
            "settle" => json!({ "ok": { "continued": diary.count("resume") } }),
            _ => json!({ "ok": {} }),
        };
        if command != "status" {
            diary.add(command);
        }
        write.write_all(format!("{answer}\n").as_bytes()).await.ok();
    }
}

/// A pod's freezer with an agent and a machine.
struct World {
    _folder: tempfile::TempDir,
    freezer: Freezer,
    diary: Diary,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl World {
    fn new(manner: Option<Manner>, settles: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (control, socket, diary) = (path("vmm.sock"), path("agent.sock"), Diary::default());
        let freezer = Freezer::new(control.clone(), Arc::new(Agent::new(socket.clone())), false);
        let mut tasks = Vec::new();
        let listener = UnixListener::bind(control).unwrap();
        tasks.push(tokio::spawn(machine(listener, settles, diary.clone())));
        if let Some(manner) = manner {
            let listener = UnixListener::bind(socket).unwrap();
            tasks.push(tokio::spawn(agent(listener, manner, diary.clone())));
        }
        Self { _folder: folder, freezer, diary, tasks }
    }

    async fn becomes_well(&self) {
        let start = Instant::now();
        while !self.diary.is_well() {
            assert!(start.elapsed() < PATIENCE, "{:?}", self.diary.0.lock());
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Another hold is possible when the last one is over.
    async fn becomes_free(&self) {
        let start = Instant::now();
        loop {
            if let Ok(hold) = self.freezer.hold(false, LIMIT).await {
                hold.release().await.unwrap();
                return;
            }
            assert!(start.elapsed() < PATIENCE, "{:?}", self.diary.0.lock());
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

const LIMIT: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_hold_freezes_before_and_thaws_after_the_machine_stood_still() {
    let world = World::new(Some(Manner::Obeys), true);
    let hold = world.freezer.hold(true, LIMIT).await.unwrap();
    let again = world.freezer.hold(true, LIMIT).await.err().unwrap().to_string();
    assert!(again.starts_with("another snapshot is being taken"), "{again}");
    let outcome = hold.release().await.unwrap();
    assert!(outcome.in_time && outcome.frozen && outcome.seconds < 10.0, "{outcome:?}");
    let did = world.diary.0.lock().unwrap().clone();
    assert_eq!(did, ["frozen", "settle", "resume", "asked to thaw", "thawed"]);
    world.becomes_free().await;
}

#[tokio::test]
async fn the_machine_goes_on_whatever_ends_the_hold() {
    // A client that is gone.
    let world = World::new(Some(Manner::Obeys), true);
    drop(world.freezer.hold(true, LIMIT).await.unwrap());
    world.becomes_well().await;
    world.becomes_free().await;
    // The time limit.
    let hold = world.freezer.hold(true, Duration::from_millis(300)).await.unwrap();
    world.becomes_well().await;
    assert!(!hold.release().await.unwrap().in_time);
    world.becomes_free().await;
    // The end of the pod.
    let hold = world.freezer.hold(true, LIMIT).await.unwrap();
    world.freezer.end(PATIENCE).await;
    assert!(world.diary.is_well());
    assert!(!hold.release().await.unwrap().in_time);
    assert!(world.freezer.hold(true, LIMIT).await.is_err());
    // A viewer resumes it, and may pause it again.
    for pauses in [false, true] {
        let world = World::new(Some(Manner::Obeys), true);
        let hold = world.freezer.hold(true, LIMIT).await.unwrap();
        world.diary.add("resume");
        if pauses {
            world.diary.add("settle");
        }
        assert!(!hold.release().await.unwrap().in_time, "{pauses}");
    }
    // A machine that cannot stand still.
    let world = World::new(Some(Manner::Obeys), false);
    let said = world.freezer.hold(true, LIMIT).await.err().unwrap().to_string();
    assert_eq!(said, "it does not settle");
    world.becomes_well().await;
    assert_eq!(world.diary.count("thawed"), 1);
    // The end of the pod while the agent freezes.
    let world = World::new(Some(Manner::Hangs), true);
    let freezer = world.freezer.clone();
    let asked = tokio::spawn(async move { freezer.hold(true, LIMIT).await.is_err() });
    sleep(Duration::from_millis(500)).await;
    timeout(PATIENCE, world.freezer.end(Duration::from_millis(10))).await.unwrap();
    assert!(asked.await.unwrap(), "a hold of a pod that ends");
    assert_eq!(world.diary.count("settle"), 0);
}

/// The label of the snapshot, and whether the file systems are thawed at the end.
#[tokio::test]
async fn bad_agents_thaw_too_and_are_not_believed() {
    let try_one = async |manner: Manner, frozen: bool| {
        let world = World::new(Some(manner), true);
        let hold = world.freezer.hold(true, LIMIT).await.unwrap();
        let outcome = hold.release().await.unwrap();
        assert!(outcome.in_time, "{manner:?}: {outcome:?}");
        assert_eq!(outcome.frozen, frozen, "{manner:?}: {outcome:?}");
        assert_eq!(outcome.why.is_empty(), frozen, "{manner:?}: {outcome:?}");
        world.becomes_well().await;
        world.becomes_free().await;
        assert!(world.diary.is_well(), "{manner:?}");
    };
    tokio::join!(
        try_one(Manner::Hangs, false),
        try_one(Manner::Lies, false),
        try_one(Manner::Refuses, false),
        try_one(Manner::Raves, true),
        try_one(Manner::Impatient, false),
        try_one(Manner::Leaves, true),
    );
}

#[tokio::test]
async fn a_guest_without_an_agent_is_held_without_freezing() {
    let world = World::new(None, true);
    let outcome = world.freezer.hold(true, LIMIT).await.unwrap().release().await.unwrap();
    assert!(outcome.in_time && !outcome.frozen, "{outcome:?}");
    assert!(outcome.why.starts_with("no agent answers"), "{outcome:?}");
    world.becomes_free().await;
    let outcome = world.freezer.hold(false, LIMIT).await.unwrap().release().await.unwrap();
    assert!(outcome.in_time && !outcome.frozen, "{outcome:?}");
}
