// What an operation says to whoever called it, where it could not do its work.
#pragma once

namespace oddrank {

// Set by an operation that failed, on the thread that ran it; whoever replays operations clears it and stops where it is
// set. Why it failed is in the operation's own arguments.
extern thread_local bool operation_failed;

}  // namespace oddrank
